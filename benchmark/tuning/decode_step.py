"""A decode step of Llama-3-8B with all kernels, then without attention, without rotary and without the head, with and without PDL.

    PYTHONPATH=python python -m benchmark.tuning.decode_step --batch-sizes 1,4,16,32 --widths 1,4

The step runs without scheduler and host. A kernel that is faster alone may be slower in the step. Weights are random and GEMMs are
autotuned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmark.record import Record, Row
from benchmark.shapes import read_rate
from benchmark.sweep import names, numbers
from benchmark.tuning.clock import median_us
from benchmark.tuning.command_line import arguments, parse_on_gpu
from benchmark.tuning.world import BF16, SHAPE, D, G, H, attention_world, decode_batch, linear
from runtime.config.device_tuning import H200
from runtime.layers.attention.base import plan_pass
from runtime.layers.attention.registry import build_backend
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import Rope, RotaryHeads

if TYPE_CHECKING:  # requires Triton, which is installed with a GPU only
    from runtime.layers.cuda_ops import CudaOps

NAME = "tuning/decode_step"
KEYS = ("layers", "backend", "batch", "width", "length", "pdl")


@dataclass(frozen=True)
class Case:
    """One kind of step: requests, tokens per request in the pass, tokens per request in total."""

    layers: int
    backend: str
    batch: int
    width: int
    length: int

    @property
    def rows(self) -> int:
        """Tokens of the pass."""
        return self.batch * self.width

    def roof_us(self, rate: float | None) -> float | None:
        """Microseconds to read weights, keys and values at `rate` bytes per second."""
        shape = replace(SHAPE, layers=self.layers)
        return None if rate is None else shape.roof.roof_ms(0, self.batch, self.length, rate) * 1e3

    def row(self, pdl: bool, us: dict[str, float], choices: dict[str, str], rate: float | None) -> Row:
        """A result row: `us` by the parts of the step, `choices` by GEMM."""
        found: Row = {**vars(self), "pdl": pdl, "us": {name: round(spent, 1) for name, spent in us.items()}, "choices": choices}
        roof = self.roof_us(rate)
        return found if roof is None else found | {"roof_us": round(roof, 1)}


@dataclass(frozen=True)
class Layer:
    """The weights of one block; both norms are one."""

    norm: RMSNorm
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear

    def gemms(self) -> list[Gemm]:
        """The GEMMs in execution order."""
        return [
            Gemm("linear", self.qkv, self.norm),
            Gemm("linear_add", self.o, self.norm),
            Gemm("gate_up", self.gate_up, self.norm),
            Gemm("linear_add", self.down, self.norm),
        ]


def model(layers: int) -> tuple[list[Layer], Linear]:
    """Blocks and head."""
    norm = RMSNorm(torch.ones(SHAPE.hidden, dtype=BF16, device="cuda"), 1e-5)
    return [Layer(norm, *(linear(name) for name in ("qkv", "o", "gate-up", "down"))) for _ in range(layers)], linear("head")


def choices(ops: CudaOps, rows: int) -> dict[str, str]:
    """The autotuned kernel of each GEMM with `rows` rows."""
    from runtime.layers.gemm.tilings import m_bucket
    from runtime.layers.gemm.timings import describe
    from runtime.layers.gemm.triton_gemm import MAX_ROWS

    if rows > MAX_ROWS:
        return {}
    return {f"{op} {out}x{width}": describe(c) for (op, out, width, most), c in ops.choices.items() if most == m_bucket(rows)}


def times(ops: CudaOps, layers: list[Layer], head: Linear, case: Case) -> dict[str, float]:
    """Microseconds of a step with all its kernels, then without attention, without rotary and without the head."""
    size, width, length, tokens = case.batch, case.width, case.length, case.rows
    shape, pool, table = attention_world(size, width, length, 1, len(layers))
    attention = build_backend(case.backend, shape, pool, table)
    batch = decode_batch(size, width, length)
    batch.out_cache_loc.copy_(table.slots(batch.req_pool_indices.repeat_interleave(width), batch.positions))
    heads = RotaryHeads(H, G, D, Rope(torch.randn((length + 64, D), device="cuda")))
    specs, context = [replace(layer, heads=heads) for layer in shape.layers], PassContext(batch, pool, attention)
    start = torch.randn((tokens, SHAPE.hidden), device="cuda")
    q_only = torch.randn((tokens, H, D), device="cuda").to(BF16)
    scores = torch.empty((tokens, SHAPE.vocab), device="cuda")
    plan_pass(attention, batch)

    def run(with_rope: bool, with_attention: bool, with_head: bool) -> None:
        stream = Stream(start.clone())
        for i, layer in enumerate(layers):
            qkv = ops.norm_linear(stream, layer.norm, layer.qkv)
            mixed = attention.forward_rows(qkv, specs[i], batch) if with_rope and with_attention else None
            if mixed is None:
                q = ops.rope_and_cache(qkv, heads, i, context) if with_rope else q_only
                mixed = attention.forward(q, specs[i], batch) if with_attention else q.flatten(1)
            stream = ops.linear_add(mixed, layer.o, stream, layer.norm)
            next_norm = layer.norm if i + 1 < len(layers) else None
            stream = ops.linear_add(ops.norm_gate_up(stream, layer.norm, layer.gate_up), layer.down, stream, next_norm)
        if with_head:
            ops.logits(ops.norm(stream.h, layers[0].norm, BF16), head, scores)

    return {
        "all": median_us(lambda: run(True, True, True)),
        "without attention": median_us(lambda: run(True, False, True)),
        "without attention, rotary": median_us(lambda: run(False, False, True)),
        "GEMMs of the layers": median_us(lambda: run(False, False, False)),
    }


def measure(cases: Sequence[Case], record: Record) -> None:
    """Time all cases without PDL and, if the GPU supports it, with PDL."""
    from runtime.layers.cuda_ops import CudaOps

    rate = read_rate(record.data["machine"])
    layers, head = model(cases[0].layers)
    early, plain = CudaOps(GemmTimings(H200)), CudaOps(GemmTimings(H200), pdl=False)
    gemms = [*(gemm for layer in layers for gemm in layer.gemms()), Gemm("logits", head, layers[0].norm)]
    early.autotune(gemms, [case.rows for case in cases])
    plain.choices = dict(early.choices)
    for case, ops in itertools.product(cases, (plain, early) if early.pdl else (plain,)):
        row = case.row(ops.pdl, times(ops, layers, head, case), choices(ops, case.rows), rate)
        record.add(row)
        share = f"; {row['roof_us'] / row['us']['all']:.0%} of the roof" if "roof_us" in row else ""
        line = ", ".join(f"{name} {spent / 1000:.3f}" for name, spent in row["us"].items())
        print(f"batch {case.batch} width {case.width} {case.backend} pdl {ops.pdl}: ms {line}{share}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and record."""
    parser = arguments("decode_step", __doc__)
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 4, 16, 32])
    parser.add_argument("--widths", type=numbers, default=[1, 4], help="tokens per request in a pass: 1, or the width of a draft window")
    parser.add_argument("--length", type=int, default=2000, help="tokens per request in total")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--backends", type=names, default=["fa3"], help="fa3, flashinfer")
    args = parse_on_gpu(parser, argv)
    tried = itertools.product(args.backends, args.batch_sizes, args.widths)
    with torch.inference_mode():
        measure([Case(args.layers, name, size, width, args.length) for name, size, width in tried], Record(NAME, KEYS, args.out))


if __name__ == "__main__":
    main()
