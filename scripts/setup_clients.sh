#!/usr/bin/env bash
# Install into .venv/clients those clients of test/process/test_clients.py that conflict with the others: litellm needs an older openai,
# instructor an older jiter; and OpenAI's client for Node, where there is npm. Does nothing if nothing changed since the last time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=.venv/clients
wanted=$(cat scripts/setup_clients.sh requirements/clients.lock | sha256sum | cut -c 1-16)
if [ -e "$folder/talon-setup" ] && grep -qxF "$wanted" "$folder/talon-setup"; then
  exit 0
fi
.venv/bin/python -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/clients.lock
# Without a registry of Node packages the rest is still tested; the test of OpenAI's client for Node is skipped.
if command -v npm >/dev/null; then
  timeout 120 npm install --silent --no-audit --no-fund --prefix "$folder" openai@6.49.0 || echo "npm cannot install openai; its test is skipped"
fi
echo "$wanted" >"$folder/talon-setup"
