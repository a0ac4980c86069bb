#!/usr/bin/env bash
# Install SGLang's bench client and front end, lm-eval, guidellm and aiperf into .venv/bench-clients, and run each against the embedded model.
# test.sh leaves them out: they take 1.5 GB of disk and some minutes. Needs Python 3.11 or later; run scripts/test.sh once before. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=.venv/bench-clients
wanted=$(cat scripts/bench_clients.sh requirements/bench_clients.lock requirements/sglang.lock | sha256sum | cut -c 1-16)
if ! { [ -e "$folder/talon-setup" ] && grep -qxF "$wanted" "$folder/talon-setup"; }; then
  .venv/bin/python -m venv "$folder"
  for lock in bench_clients sglang; do
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "requirements/$lock.lock"
  done
  # PyTorch, which guidellm loads, is that of the project.
  packages='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$packages" >"$("$folder/bin/python" -c "$packages")/talon.pth"
  echo "$wanted" >"$folder/talon-setup"
fi
.venv/bin/python -m pytest test/process/test_bench_clients.py "$@"
