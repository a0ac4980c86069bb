# shellcheck shell=bash
# Sourced by serve.sh and test.sh. Defines `talon_setup [EXTRA,EXTRA]`, which activates a .venv in the project's root with the package and
# the named extras.
#
# Installs only if pyproject.toml, the locks or the extras changed since the last time. Needs python3 >= 3.10 with venv, and a network the first time.

talon_setup() {
  local lock status=0
  exec {lock}<pyproject.toml
  flock "$lock" # two commands started together would install into .venv at once
  talon_set_up "$@" || status=$?
  exec {lock}<&- # what starts next must not inherit it
  return "$status"
}

talon_set_up() {
  local extras=${1:-} stamp wanted python
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "talon: $("$python" --version) is not supported; install Python 3.10 to 3.13, or set PYTHON to one" >&2
    return 2
  }
  if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv || {
      echo "talon: the virtual environment could not be created; on Debian: apt-get install python3-venv" >&2
      return 2
    }
  fi
  # shellcheck disable=SC1091
  source .venv/bin/activate || return
  # An environment with more extras also satisfies a request for fewer.
  stamp=.venv/talon-setup
  wanted="$(cat pyproject.toml requirements/*.lock | sha256sum | cut -c 1-16) $extras"
  if [ -e "$stamp" ] && grep -qxF "$wanted" "$stamp"; then
    return 0
  fi
  echo "talon: installing into .venv (takes a few minutes, once)" >&2
  python -c 'import torch' 2>/dev/null || talon_torch || return
  talon_install --require-hashes -r "requirements/$([ -n "$extras" ] && echo test || echo serve).lock" || return
  talon_install --no-build-isolation -e . || return
  { grep -s "^$(cut -d ' ' -f 1 <<<"$wanted") " "$stamp" || true; echo "$wanted"; [ -z "$extras" ] || echo "${wanted%% *} "; } >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

talon_install() {
  python -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}

# Without a GPU the CPU build; the build with CUDA libraries if there is a GPU, or if PyTorch's own index cannot be reached.
talon_torch() {
  command -v nvidia-smi >/dev/null || ! talon_install --retries 1 --require-hashes -r requirements/torch-cpu.lock || return 0
  talon_install --require-hashes -r requirements/torch.lock
}
