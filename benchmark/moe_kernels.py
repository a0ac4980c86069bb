"""One sparse layer of public models by number of tokens: routing, experts, both, and their share of the roof.

Weights and routers are random, graphs run through several layers, and each call has different tokens. The roof reads each
selected expert once; for prompts the reference is cuBLAS with the same number of FLOPs in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import torch

from benchmark import picture, plots
from benchmark.expert_layers import BF16, SHAPES, ExpertLayers, ExpertShape, microseconds
from benchmark.markdown import Result, percent, provenance, split, table
from benchmark.record import Record, Row
from benchmark.shapes import read_rate
from benchmark.sweep import numbers
from runtime.config.device_tuning import tuning_of
from runtime.config.expert_tuning import ExpertTuning
from runtime.config.machine import probe

NAME = "moe_kernels"
KEYS = ("shape", "rows")
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192]
PROMPT_ROWS = 1024
"""From this number of tokens on, the time is bound by arithmetic."""


def measure(shape: ExpertShape, counts: Sequence[int], bytes_per_second: float | None) -> list[Row]:
    """One row for each number of tokens. `bytes_per_second` is the memory bandwidth; None omits the roof."""
    layers, tuning = ExpertLayers(shape), tuning_of(probe().gpus[0]).experts
    return [
        {"shape": shape.name, "format": shape.format, "rows": rows, **_measure(layers, tuning, rows, bytes_per_second)} for rows in counts
    ]


def _measure(layers: ExpertLayers, tuning: ExpertTuning, rows: int, bytes_per_second: float | None) -> Row:
    from runtime.layers.moe.kernels.expert_pass import ExpertPass
    from runtime.layers.moe.kernels.run_experts import run_experts

    shape, inputs = layers.shape, layers.inputs(rows)
    out = torch.empty((rows, shape.hidden), device="cuda")
    routings = [layers.route(x, call) for call, x in enumerate(inputs)]

    def experts(call: int, routing: object) -> None:
        weights = layers.layers[call % len(layers.layers)]
        run_experts(ExpertPass(inputs[call], *weights, routing, layers.act, out, pdl=True), tuning)  # type: ignore[arg-type]

    times = {
        "route_us": microseconds(lambda call: layers.route(inputs[call], call), len(inputs)),
        "experts_us": microseconds(lambda call: experts(call, routings[call]), len(inputs)),
        "layer_us": microseconds(lambda call: experts(call, layers.route(inputs[call], call)), len(inputs)),
    }
    distinct = layers.distinct(routings)
    read = distinct * shape.expert_bytes + 2 * rows * shape.hidden * BF16.itemsize
    found: Row = {**times, "distinct_experts": distinct, "bytes": read}
    if bytes_per_second is not None:
        roof = read / bytes_per_second * 1e6
        found |= {"roof_us": roof, "roof_share": roof / times["experts_us"]}
    if rows >= PROMPT_ROWS:
        flop = 2 * shape.expert_weights * rows * shape.top_k
        dense = _cublas_us(shape, rows)
        found |= {
            "tflops": flop / times["experts_us"] / 1e6,
            "cublas_tflops": flop / dense / 1e6,
            "cublas_share": dense / times["experts_us"],
        }
    return found


def _cublas_us(shape: ExpertShape, rows: int) -> float:
    """Microseconds of dense bfloat16 GEMMs with the FLOPs of a layer."""
    pairs = rows * shape.top_k
    x, h = (torch.randn((pairs, columns), device="cuda").to(BF16) for columns in (shape.hidden, shape.inner))
    gate_up = torch.randn((2 * shape.inner, shape.hidden), device="cuda").to(BF16)
    down = torch.randn((shape.hidden, shape.inner), device="cuda").to(BF16)
    torch.mm(x[:16], gate_up.t())  # creates cuBLAS's handle, which is not possible during capture
    return microseconds(lambda _: (torch.mm(x, gate_up.t()), torch.mm(h, down.t())), 2)


def render(result: Result) -> str:
    """Times and shares of the roof, one row for each shape and number of tokens."""
    lines = [
        [
            row["shape"], row["rows"], row["distinct_experts"], row["route_us"], row["experts_us"], row["layer_us"], row.get("roof_us"),
            percent(row.get("roof_share")), row.get("tflops"), percent(row.get("cublas_share")),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    header = [
        "layer",
        "tokens",
        "experts hit",
        "routing, µs",
        "experts, µs",
        "both, µs",
        "bytes, µs",
        "of the roof",
        "TFLOP/s",
        "of cuBLAS",
    ]
    return "\n".join([table(header, lines), "", provenance(result)])


def summary(result: Result) -> str:
    """Shares of the byte roof by number of tokens."""
    rows = result["rows"]
    counts = sorted({row["rows"] for row in rows if row["rows"] < PROMPT_ROWS})
    lines = []
    for shape, own in split(rows, itemgetter("shape")).items():
        by = {row["rows"]: row for row in own}
        lines.append([shape, *(percent(by[count].get("roof_share")) if count in by else None for count in counts)])
    return table(["experts, share of the roof", *(f"{count} tokens" for count in counts)], lines)


def plot(result: Result, file: Path) -> None:
    """Shares of the roof by number of tokens."""
    few = [row for row in result["rows"] if row["rows"] < PROMPT_ROWS and "roof_share" in row]
    shares = {shape: [(row["rows"], row["roof_share"]) for row in own] for shape, own in split(few, itemgetter("shape")).items()}
    panel = plots.lines(shares, "", "tokens", "share of the byte roof", 1.0)
    picture.draw(result, file, "Experts of sparse layers against reading their weights once", [panel])


def main() -> None:
    """Measure, record and plot."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmark.{NAME}", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for result files instead of benchmark/results")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="numbers of tokens (default %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"{parser.prog}: a CUDA GPU is required, and torch finds none")
    record = Record(NAME, KEYS, args.out)
    with torch.inference_mode():
        for shape in SHAPES:
            for row in measure(shape, args.rows, read_rate(record.data["machine"])):
                record.add(row)
            torch.cuda.empty_cache()
    record.show(render, plot)


if __name__ == "__main__":
    main()
