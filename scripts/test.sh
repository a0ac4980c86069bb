#!/usr/bin/env bash
# Set up what is missing and run every check: lint, types, import contracts, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
talon_setup test,dev,clients
bash scripts/setup_browser.sh
bash scripts/setup_prometheus.sh
bash scripts/setup_clients.sh

ruff check python test benchmark scripts
ruff format --check python test benchmark scripts
pyright python
lint-imports
# Three workers, because tests often wait for servers, with one file of tests at a time each; -n 0 runs all tests in one process. One torch
# thread per process: tests run real servers side by side on two cores. Files keep their order, so that the long ones under test/process
# start first. PYTHONDONTWRITEBYTECODE would make every interpreter that a test starts compile all modules again.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE= python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
