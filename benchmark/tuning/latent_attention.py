"""Latent attention per layer: microseconds in graphs of several layers, for split-KV attention, the cluster kernel and FA3.

    PYTHONPATH=python python -m benchmark.tuning.latent_attention --heads 20 --batch-sizes 1,8

Keys have 512 + 64 columns in bfloat16. Each layer has its own keys, so that they are in L2 only if they would be in a real model. A row
for each number of heads, requests, queries and keys has a time for each kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from benchmark.record import Record, Row
from benchmark.shapes import read_rate
from benchmark.sweep import numbers
from benchmark.tuning.clock import median_us
from benchmark.tuning.command_line import arguments, parse_on_gpu
from runtime.config.kernel_configs import LatentConfig

NAME = "tuning/latent_attention"
KEYS = ("heads", "batch", "width", "keys")
LAYERS, PAGE_SIZE = 8, 64
MAX_ROWS = 1 << 21
"""Most keys of all requests together; larger combinations are skipped."""
RANK, ROPE = 512, 64
CUTS = {
    "16x32 4 warps": LatentConfig(16, 32, 4, 3),
    "32x32 8 warps": LatentConfig(32, 32, 8, 2),
    "64x32 8 warps": LatentConfig(64, 32, 8, 2),
    "32x64 8 warps": LatentConfig(32, 64, 8, 3),
    "64x64 8 warps": LatentConfig(64, 64, 8, 2),
    "32x32 8 warps 2/SM": LatentConfig(32, 32, 8, 2, 2),
}
"""Split configurations by name: keys of a tile x rows of a program."""


def main(argv: Sequence[str] | None = None) -> None:
    """Time every combination and record."""
    parser = arguments("latent_attention", __doc__)
    parser.add_argument("--heads", type=numbers, default=[16, 20, 64, 128], help="query heads")
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--widths", type=numbers, default=[1, 4], help="queries per request")
    parser.add_argument("--lengths", type=numbers, default=[1024, 4096, 16384], help="keys per request")
    parser.add_argument("--no-fa3", action="store_true", help="leave FA3 out: a build without its latent kernels ends the process")
    args = parse_on_gpu(parser, argv)
    record = Record(NAME, KEYS, args.out)
    rate = read_rate(record.data["machine"])
    with torch.inference_mode():
        for heads, batch, width, length in itertools.product(args.heads, args.batch_sizes, args.widths, args.lengths):
            if batch * length * LAYERS <= MAX_ROWS:
                record.add(measure(heads, batch, width, length, not args.no_fa3, rate))
                print(record.rows[-1], flush=True)


def measure(heads: int, batch: int, width: int, length: int, with_fa3: bool, rate: float | None) -> Row:
    """Microseconds per layer of each kernel, and of reading the keys once if the machine's rate is known."""
    from runtime.layers.attention.kernels.latent_cluster import latent_cluster_attention, supports
    from runtime.layers.attention.kernels.latent_decode import LatentShape, LatentWorkspace, latent_attention, trial_inputs
    from runtime.layers.attention.kernels.paged_keys import CausalQueries

    device, sms = torch.device("cuda"), torch.cuda.get_device_properties(0).multi_processor_count
    cuts = {name: LatentShape(batch, width, heads, RANK, ROPE, sms, config) for name, config in CUTS.items()}
    inputs = [trial_inputs(next(iter(cuts.values())), PAGE_SIZE, torch.bfloat16, device, length) for _ in range(LAYERS)]
    runs: dict[str, Callable[[int], object]] = {}
    for name, cut in cuts.items():
        workspace = LatentWorkspace([cut], device)
        runs[name] = lambda i, cut=cut, workspace=workspace: latent_attention(*inputs[i], cut, workspace, 0.07, pdl=True)
    shape = next(iter(cuts.values()))
    if supports(shape, PAGE_SIZE, inputs[0][1], pdl=True):
        runs["clusters"] = lambda i: latent_cluster_attention(*inputs[i], shape, 0.07, pdl=True)
    if with_fa3:
        from runtime.layers.attention.latent_fa3 import flash_latent

        queries = CausalQueries.uniform(batch, width, device)
        runs["fa3"] = lambda i: flash_latent(*inputs[i], queries, 0.07)
    times = {name: time for name, run in runs.items() if (time := _micros(run)) is not None}
    row: Row = {"heads": heads, "batch": batch, "width": width, "keys": length, "us": times}
    return row if rate is None else row | {"roof_us": round(batch * length * (RANK + ROPE) * 2 / rate * 1e6, 2)}


def _micros(run: Callable[[int], object]) -> float | None:
    """Microseconds of one layer, in a graph of all layers; None for a configuration that does not fit the GPU."""
    from triton.runtime.errors import OutOfResources

    def layers() -> None:
        for i in range(LAYERS):
            run(i)

    try:
        return round(median_us(layers) / LAYERS, 2)
    except OutOfResources:
        return None


if __name__ == "__main__":
    main()
