#!/usr/bin/env bash
# Check a GPU machine, without a network: see gpu_check.py, whose arguments it takes.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
