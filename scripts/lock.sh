#!/usr/bin/env bash
# Pin every package that serve.sh and test.sh install, with hashes, in requirements/*.lock. Needs uv and a network; run it after a change to
# the dependencies in pyproject.toml. Arguments go to `uv pip compile`, such as --upgrade.
#
# torch.lock is PyPI's build of PyTorch with its CUDA libraries. torch-cpu.lock is written by hand: the hashes of PyTorch's own index; so is
# sglang.lock: SGLang's clients need few of the packages that SGLang asks for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../requirements"

compile() {
  uv pip compile --quiet --universal --python-version "${python:-3.10}" --generate-hashes --no-annotate --custom-compile-command scripts/lock.sh "$@"
}

compile "${@:2}" -o torch.lock - <<<"torch==${1:-2.13.0}"
mapfile -t torch < <(grep -oE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)=' torch.lock | sort -u | sed 's/^/--no-emit-package=/; s/=$//')
compile "${@:2}" -c torch.lock "${torch[@]}" --extra test --extra dev --extra clients -o test.lock ../pyproject.toml
compile "${@:2}" -c torch.lock -c test.lock "${torch[@]}" -o serve.lock ../pyproject.toml
compile "${@:2}" -o clients.lock clients.in
python=3.11 compile "${@:2}" -c torch.lock "${torch[@]}" -o bench_clients.lock bench_clients.in
