#!/usr/bin/env bash
# Install Chromium for the tests of the chat page. Needs root and apt-get; without them, or with TALON_NO_BROWSER=1, those tests are skipped.
set -uo pipefail

for browser in chromium chromium-browser google-chrome google-chrome-stable chrome; do
  if command -v "$browser" >/dev/null; then
    exit 0
  fi
done
if [ "${TALON_NO_BROWSER:-0}" = 1 ]; then
  echo "talon: TALON_NO_BROWSER=1, no browser is installed; the tests of the chat page are skipped" >&2
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "talon: no browser found; install the package chromium to run the tests of the chat page" >&2
  exit 0
fi
echo "talon: installing the package chromium for the tests of the chat page (TALON_NO_BROWSER=1 skips it)" >&2
if ! { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >&2; then
  echo "talon: chromium could not be installed, see above; the tests of the chat page are skipped" >&2
fi
