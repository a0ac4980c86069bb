"""One decode pass of each attention backend by page size: microseconds per layer, in graphs of 16 layers that share the keys of 4.

PYTHONPATH=python python -m benchmark.tuning.attention_backends --backends fa3,flashinfer --pages 1,16
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmark.record import Record, Row
from benchmark.shapes import read_rate
from benchmark.sweep import names, numbers
from benchmark.tuning.clock import median_us
from benchmark.tuning.command_line import arguments, parse_on_gpu
from benchmark.tuning.world import BF16, D, H, attention_roof_us, attention_world, decode_batch
from runtime.layers.attention.base import plan_pass
from runtime.layers.attention.registry import build_backend

NAME = "tuning/attention_backends"
LAYERS, PASSES = 4, 16


class Case(NamedTuple):
    """One kind of pass: `batch` requests with `length` keys and `width` queries each."""

    backend: str
    page: int
    width: int
    batch: int
    length: int

    def row(self, us: float, rate: float | None) -> Row:
        """The row of a layer that takes `us` microseconds."""
        found: Row = {**self._asdict(), "us": round(us, 2)}
        roof = attention_roof_us(self.batch, self.length, rate)
        return found if roof is None else found | {"roof_us": round(roof, 2)}


def time(case: Case) -> float:
    """Microseconds of one layer."""
    shape, pool, table = attention_world(case.batch, case.width, case.length, case.page, LAYERS)
    attention, batch = build_backend(case.backend, shape, pool, table), decode_batch(case.batch, case.width, case.length)
    q = torch.randn((case.batch * case.width, H, D), device="cuda").to(BF16)
    plan_pass(attention, batch)
    return median_us(lambda: [attention.forward(q, shape.layers[i % LAYERS], batch) for i in range(PASSES)]) / PASSES


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and record."""
    parser = arguments("attention_backends", __doc__)
    parser.add_argument("--backends", type=names, default=["fa3"], help="fa3, flashinfer")
    parser.add_argument("--pages", type=numbers, default=[1, 16], help="page sizes")
    parser.add_argument("--widths", type=numbers, default=[1, 4], help="queries per request")
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 8, 32])
    parser.add_argument("--length", type=int, default=2000, help="keys per request")
    args = parse_on_gpu(parser, argv)
    record = Record(NAME, Case._fields, args.out)
    rate = read_rate(record.data["machine"])
    with torch.inference_mode():
        for values in itertools.product(args.backends, args.pages, args.widths, args.batch_sizes, [args.length]):
            row = (case := Case(*values)).row(time(case), rate)
            record.add(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
