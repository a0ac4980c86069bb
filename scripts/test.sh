#!/usr/bin/env bash
# Set up what is missing and run every check: lint, types, the stairs of the architecture, tests. Takes pytest arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
talon_setup test,dev

ruff check python test benchmark scripts
ruff format --check python test benchmark scripts
pyright python
lint-imports
# The chat page is checked in a real browser; without one those tests are skipped and say so.
if ! command -v chromium chromium-browser google-chrome google-chrome-stable chrome >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 ||
    echo "talon: no Chromium could be installed; the tests of the chat page will be skipped" >&2
fi
# One torch thread a process: tests run real servers beside each other on two cores.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m pytest "$@"
