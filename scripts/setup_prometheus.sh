#!/usr/bin/env bash
# Install Prometheus for the test of the Grafana board. Needs root and apt-get; without them, or with TALON_NO_PROMETHEUS=1, it is skipped.
set -uo pipefail

if command -v prometheus >/dev/null || [ "${TALON_NO_PROMETHEUS:-0}" = 1 ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "talon: no Prometheus found; install the package prometheus to test the queries of the Grafana board" >&2
  exit 0
fi
echo "talon: installing the package prometheus for the test of the Grafana board (TALON_NO_PROMETHEUS=1 skips it)" >&2
if ! { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends prometheus; } >&2; then
  echo "talon: prometheus could not be installed, see above; the test of the Grafana board is skipped" >&2
fi
