"""Latent attention per layer: microseconds in graphs of several layers, for split-KV attention, the cluster kernel and FA3.

    PYTHONPATH=python:. python -m benchmark.latent_attention [--quick] [--no-fa3] [--output FILE]

Keys have 512 + 64 columns in bfloat16. Each layer has its own keys, so that they are in L2 only if they would be in a real model. The
result is one JSON object: a row for each number of heads, requests, queries and keys, with a time for each kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmark.machine import describe
from benchmark.shapes import read_rate
from runtime.config.kernel_configs import LatentConfig

HEADS, BATCHES, WIDTHS, LENGTHS = (16, 20, 64, 128), (1, 4, 8, 16, 32, 64), (1, 4), (1024, 4096, 16384)
QUICK = (20,), (1, 8), (1, 4), (1024,)
LAYERS, REPLAYS, PAGE_SIZE = 8, 5, 64
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
    """Time every combination and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one number of heads, two batch sizes, 1k keys")
    parser.add_argument("--no-fa3", action="store_true", help="leave FA3 out: a build without its latent kernels ends the process")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    args = parser.parse_args(argv)
    heads, batches, widths, lengths = QUICK if args.quick else (HEADS, BATCHES, WIDTHS, LENGTHS)
    bytes_per_second = read_rate(describe())
    with torch.inference_mode():
        rows = [
            measure(h, batch, width, length, not args.no_fa3, bytes_per_second)
            for h in heads
            for batch in batches
            for width in widths
            for length in lengths
            if batch * length * LAYERS <= MAX_ROWS
        ]
    report = {"device": torch.cuda.get_device_name(), "layers": LAYERS, "page_size": PAGE_SIZE, "rows": rows}
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    best = [row["split"] < row["fa3"] for row in rows if "fa3" in row]
    print(f"{len(rows)} combinations; split attention is faster in {sum(best)} of {len(best)}")


def measure(heads: int, batch: int, width: int, length: int, with_fa3: bool, bytes_per_second: float | None) -> dict[str, object]:
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
    cut_times = [times[name] for name in cuts if name in times]
    row: dict[str, object] = {"heads": heads, "batch": batch, "width": width, "keys": length, "times": times}
    row["split"] = min(cut_times)
    if bytes_per_second is not None:
        row["roof"] = round(batch * length * (RANK + ROPE) * 2 / bytes_per_second * 1e6, 2)
    row |= {name: times[name] for name in ("clusters", "fa3") if name in times}
    print(row, flush=True)
    return row


def _micros(run: Callable[[int], object]) -> float | None:
    """Microseconds of one layer, in a graph of all layers; None for a configuration that does not fit the GPU."""
    from triton.runtime.errors import OutOfResources

    from runtime.layers.kernels.graph_timer import replay_times

    def layers() -> None:
        for i in range(LAYERS):
            run(i)

    try:
        layers()
    except OutOfResources:
        return None
    return round(statistics.median(replay_times(layers, REPLAYS)) / LAYERS, 2)


if __name__ == "__main__":
    main()
