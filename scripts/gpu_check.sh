#!/usr/bin/env bash
# Check a GPU machine, without a network: versions, test/gpu, and the benchmarks named. Results and logs go to a folder.
#
#     bash scripts/gpu_check.sh FOLDER [--no-tests] ["BENCHMARK ARGUMENTS" ...]
#     bash scripts/gpu_check.sh /tmp/out "engine_steps --load-format dummy --model-path benchmark/configs/llama-3-8b" kernels
#
# The environment must hold the package's cuda extra (pip install -e ".[cuda,test]"). Exits 1 if anything failed, after running everything.
set -uo pipefail
case ${1:-} in "" | -*) sed -n '2,7p' "${BASH_SOURCE[0]}"; exit 2 ;; esac
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
failed=0
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/python:$PWD:${PYTHONPATH:-}"

python3 - <<'PY' || failed=1
import importlib.metadata as metadata, re, sys, torch
extra = re.search(r"^cuda = \[(.*?)\]", open("pyproject.toml").read(), re.M | re.S)  # Python 3.10 has no tomllib
wanted = re.findall(r'"([^"]+)"', extra[1])
bad = 0
for pin in wanted:
    name, _, version = pin.partition("==")
    have = torch.__version__.split("+")[0] if name == "torch" else next((metadata.version(n) for n in [name] if any(d.name == n for d in metadata.distributions())), None)
    print(f"{name:20} {have or 'missing':12} wanted {version}")
    bad += have != version
print("device", torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none", torch.cuda.get_device_capability(0) if torch.cuda.is_available() else "")
sys.exit(bool(bad) or not torch.cuda.is_available())
PY

if [ "${1:-}" = "--no-tests" ]; then
  shift
else
  python3 -m pytest test/gpu -q --maxfail=20 -p no:cacheprovider >"$out/pytest.log" 2>&1 || failed=1
  tail -n 25 "$out/pytest.log"
fi
for benchmark in "$@"; do
  name=${benchmark%% *}
  echo "== benchmark.$benchmark"
  # shellcheck disable=SC2086
  python3 -m benchmark.$benchmark --out "$out" >"$out/$name.log" 2>&1 || { failed=1; echo "failed: $name"; }
  tail -n 25 "$out/$name.log"
done
exit $failed
