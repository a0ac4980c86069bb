#!/usr/bin/env bash
# Set up what is missing and run every check: lint, types, import contracts, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
talon_setup test,dev,clients
bash scripts/setup_browser.sh
bash scripts/setup_prometheus.sh
bash scripts/setup_clients.sh

# Pyright takes a minute of a core: code that passed is not checked again.
types() {
  local passed=.venv/pyright-passed code
  code=$(cat .venv/talon-setup <(find python -name '*.py' -print0 | sort -z | xargs -0 sha256sum) | sha256sum)
  [ "$(cat "$passed" 2>/dev/null)" = "$code" ] || { pyright python && echo "$code" >"$passed"; }
}

checks() {
  local failed=0
  ruff check python test benchmark scripts || failed=1
  ruff format --check python test benchmark scripts || failed=1
  lint-imports || failed=1
  types || failed=1
  return $failed
}

# Lint and types run in parallel with the tests; their output is printed at the end.
said=$(mktemp) failed=0
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$said"' EXIT
checks >"$said" 2>&1 &
# Five workers for two cores, because one waits in the storm and the others often wait for servers, with one file of tests at a time
# each; -n 0 runs all tests in one process. One torch thread per process: tests run real servers side by side. Files keep their order, so
# that the long ones under test/process start first. PYTHONDONTWRITEBYTECODE would make every interpreter that a test starts compile all
# modules again.
# The storm lasts 90 s here, in which every process is killed; with pytest alone it lasts 12 s.
export TALON_STORM_MINUTES=${TALON_STORM_MINUTES:-1.5}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE= python -m pytest -n 5 --dist loadfile --no-loadscope-reorder "$@" || failed=$?
wait $! || failed=1
cat "$said"
exit $failed
