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
# One torch thread a process: tests run real servers beside each other on two cores.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m pytest "$@"
