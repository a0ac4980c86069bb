#!/usr/bin/env bash
# Set up what is missing and serve. Without arguments: the embedded chat model at http://127.0.0.1:30000. Arguments go to launch_server.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
talon_setup
exec python -m runtime.launch_server "$@"
