"""All promising configurations of the Triton GEMM for each GEMM of Llama-3-8B, timed in graphs after the kernels that precede them.

    PYTHONPATH=python python -m benchmark.tuning.gemms --rows 1,4,16,32

The tool compiles in many processes into Triton's cache. Then it times tile sizes, then prefetch distance and launch time of the best ones,
then whole layers with the fastest. The fastest belong in the table of config/device_tuning.py.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmark.record import Record, Row
from benchmark.shapes import read_rate
from benchmark.sweep import numbers
from benchmark.tuning.clock import best_us
from benchmark.tuning.command_line import arguments, parse_on_gpu
from benchmark.tuning.world import BF16, SHAPE, WEIGHTS, linear
from runtime.config.device_tuning import H200
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm

if TYPE_CHECKING:  # requires Triton, which is installed with a GPU only
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.gemm import GemmOp
    from runtime.layers.gemm.timings import GemmChoice
    from runtime.layers.gemm.triton_gemm import TritonConfig

NAME = "tuning/gemms"
KEYS = ("gemm", "rows")
SHARED_MEMORY = 227 << 10
"""Bytes of shared memory that a thread block may use on Hopper."""
ENOUGH_BYTES = 400 << 20
"""Bytes of weights per timing, several times the size of L2."""
TOLERANCE = 1e-2
"""Maximum relative error against cuBLAS."""
PREFETCHES = (0, 512, 2048, 4096)
CHAIN_LAYERS = 6
TILES = (
    (16, 128, 2, (6, 8)),
    (16, 128, 4, (6, 8)),
    (16, 256, 2, (4, 6)),
    (16, 256, 4, (4, 5, 6)),
    (16, 512, 4, (3, 4)),
    (32, 64, 2, (6, 8)),
    (32, 64, 4, (6, 8)),
    (32, 128, 2, (4, 6, 8)),
    (32, 128, 4, (4, 5, 6, 8)),
    (32, 256, 4, (3, 4, 5)),
    (32, 256, 8, (3, 4)),
    (32, 512, 4, (3,)),
    (64, 64, 2, (4, 6)),
    (64, 64, 4, (4, 6, 8)),
    (64, 128, 4, (3, 4, 5, 6)),
    (64, 128, 8, (4, 5)),
    (64, 256, 4, (3, 4)),
    (64, 256, 8, (3, 4)),
    (128, 64, 4, (3, 4, 6)),
    (128, 64, 8, (4, 6)),
    (128, 128, 4, (3, 4)),
    (128, 128, 8, (3, 4)),
    (256, 64, 8, (3, 4)),
)
"""Weight rows, columns, warps, and numbers of stages to try."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a layer with a weight in `WEIGHTS`: its operation, and the tile heights that give enough programs."""

    name: str
    op: GemmOp
    tiles: tuple[int, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes that the GEMM must read."""
        rows, columns = WEIGHTS[self.name]
        return rows * columns * BF16.itemsize


GEMMS = (
    Gemm("qkv", "linear", (16, 32, 64)),
    Gemm("o", "linear_add", (16, 32)),
    Gemm("gate-up", "gate_up", (32, 64, 128, 256)),
    Gemm("down", "linear_add", (16, 32)),
    Gemm("head", "logits", (32, 64, 128, 256)),
)


def candidates(gemm: Gemm, padded: Mapping[bool, int]) -> Iterator[tuple[int, int, int, int, bool, bool]]:
    """The configurations that fit into shared memory: the arguments of `TritonConfig`.

    Args:
        gemm: the GEMM.
        padded: rows of x that the kernel computes, without and with `swap`.
    """
    for (block_n, block_k, warps, depths), swap, tma in itertools.product(TILES, (False, True), (False, True)):
        if block_n not in gemm.tiles:
            continue
        for stages in depths:
            if stages * block_k * BF16.itemsize * (block_n + padded[swap]) <= SHARED_MEMORY:
                yield block_n, block_k, warps, stages, swap, tma


def configs(gemm: Gemm, rows: int) -> list[TritonConfig]:
    """The candidates for `rows` rows."""
    from runtime.layers.gemm.triton_gemm import TritonConfig, padded_rows

    return [TritonConfig(*config) for config in candidates(gemm, {swap: padded_rows(rows, swap) for swap in (False, True)})]


def compile_one(job: tuple[GemmOp, int, TritonConfig]) -> str:
    """Compile one kernel into Triton's cache, in its own process; return the error or ""."""
    from triton.runtime.jit import MockTensor

    from runtime.layers.gemm.triton_gemm import triton_gemm

    op, rows, config = job
    out_dtype = torch.float32 if op in ("linear_add", "logits") else BF16
    x, weight = MockTensor(BF16, [rows, SHAPE.hidden]), MockTensor(BF16, [SHAPE.hidden, SHAPE.hidden])
    epilogue = Epilogue(silu=op == "gate_up", add=op == "linear_add")
    out = MockTensor(out_dtype, [rows, epilogue.columns(SHAPE.hidden)])
    try:
        triton_gemm(x, weight, out, config, epilogue, pdl=True, launch=False)  # type: ignore[arg-type]
    except Exception as error:  # a failed compilation is a result
        return f"{op} {rows} {config}: {type(error).__name__} {str(error)[:200]}"
    return ""


def compile_all(rows: Sequence[int]) -> None:
    """Compile all candidates, once for all row counts that share a kernel."""
    from runtime.layers.gemm.triton_gemm import padded_rows

    jobs = {(p.op, padded_rows(m, c.swap) if m > 8 else 1, c) for p in GEMMS for m in rows for c in configs(p, m)}
    start = time.perf_counter()
    workers = max((os.cpu_count() or 2) - 1, 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failed = [line for line in pool.map(compile_one, jobs, chunksize=4) if line]
    print(f"compiled {len(jobs)} kernels, {len(failed)} failed, {time.perf_counter() - start:.0f} s", flush=True)
    for line in failed[:8]:
        print("  failed:", line)


class Bench:
    """The weights of one GEMM and the timing of kernels for it."""

    def __init__(self, ops: CudaOps, gemm: Gemm, norm: RMSNorm) -> None:
        count = max(-(-ENOUGH_BYTES // gemm.weight_bytes), 1 if gemm.name == "head" else 2)
        self.ops, self.gemm, self.norm = ops, gemm, norm
        self.linears = [linear(gemm.name) for _ in range(count)]
        self.calls = self.linears * 2
        self._wanted: dict[int, torch.Tensor] = {}  # results of cuBLAS, which is timed first

    def time(self, rows: int, choice: GemmChoice) -> float | None:
        """Microseconds per GEMM with the norm before it; None if it does not fit or is wrong."""
        from triton.runtime.errors import OutOfResources

        out, width = WEIGHTS[self.gemm.name]
        generator = torch.Generator("cuda").manual_seed(rows)
        h = torch.randn((rows, SHAPE.hidden), device="cuda", generator=generator)
        x = torch.randn((rows, width), device="cuda", generator=generator).to(BF16)
        scores = torch.empty((rows, out if self.gemm.op == "logits" else 1), device="cuda")
        try:
            got = self._one(h.clone(), x, scores, self.linears[0], choice).float().clone()
            spent = best_us(lambda: [self._one(h, x, scores, weight, choice) for weight in self.calls]) / len(self.calls)
        except OutOfResources:
            return None
        want = self._wanted.setdefault(rows, got)
        if not float((got - want).norm() / want.norm()) < TOLERANCE:
            print(f"WRONG: {self.gemm.name}, {rows} rows, {choice}", flush=True)
            return None
        return spent

    def _one(self, h: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, weight: Linear, choice: GemmChoice) -> torch.Tensor:
        ops, op = self.ops, self.gemm.op
        if op == "linear":
            return ops._linear(ops.norm(h, self.norm, BF16), None, weight, choice)
        if op == "gate_up":
            return ops._gate_up(ops.norm(h, self.norm, BF16), None, weight, choice)
        return ops._logits(x, weight, scores, choice) if op == "logits" else ops._linear_add(x, weight, h, None, choice).h


def best(times: Mapping[GemmChoice, float], count: int) -> list[TritonConfig]:
    """The fastest configurations, without cuBLAS."""
    return sorted((c for c in times if c is not None), key=lambda c: times[c])[:count]  # type: ignore[misc]


def kinds(times: Mapping[GemmChoice, float]) -> str:
    """cuBLAS and the fastest configuration of each combination of `swap` and `tma`, with the default prefetch."""
    lines = [f"cuBLAS {times[None]:.1f}"]
    for swap, tma in itertools.product((False, True), (False, True)):
        own = {c: t for c, t in times.items() if c is not None and (c.swap, c.tma, c.prefetch, c.late) == (swap, tma, 1024, False)}
        for config in best(own, 1):
            name = f"{'swap ' if swap else ''}{'tma' if tma else ''}".strip() or "plain"
            lines.append(f"{name} {own[config]:.1f} ({config})")
    return "; ".join(lines)


def row(gemm: Gemm, rows: int, times: Mapping[GemmChoice, float], rate: float | None) -> Row:
    """A result row of one GEMM and row count: all times, fastest first, and the roof."""
    ordered = sorted(times.items(), key=lambda item: item[1])
    found: Row = {"gemm": gemm.name, "rows": rows, "us": {str(c or "cuBLAS"): round(spent, 2) for c, spent in ordered}}
    return found if rate is None else found | {"roof_us": round(gemm.weight_bytes / rate * 1e6, 2)}


def sweep_one(bench: Bench, rows: int) -> dict[GemmChoice, float]:
    """Time the candidates of one GEMM, then the prefetch variants of the best; print the fastest."""
    tried: list[GemmChoice] = [None, *configs(bench.gemm, rows)]
    times = {c: t for c in tried if (t := bench.time(rows, c)) is not None}
    for config in best(times, 3):
        for prefetch, late in itertools.product(PREFETCHES, (False, True)):
            variant = replace(config, prefetch=prefetch, late=late)
            if (spent := bench.time(rows, variant)) is not None:
                times[variant] = spent
    print(f"{bench.gemm.name}, {rows} rows: {kinds(times)}", flush=True)
    for config in best(times, 4):
        rate = bench.gemm.weight_bytes / times[config] / 1e6
        print(f"    {times[config]:.2f} µs {rate:.2f} TB/s  {config}", flush=True)
    return times


def chain(benches: Mapping[str, Bench], rows: int, winners: Mapping[str, TritonConfig]) -> dict[str, float]:
    """Microseconds of a layer without attention and rotary: with the fastest configurations, and with one prefetch variant for all."""
    ops, norm = benches["qkv"].ops, benches["qkv"].norm
    h = torch.randn((rows, SHAPE.hidden), device="cuda")
    attended = torch.randn((rows, SHAPE.hidden), device="cuda").to(BF16)

    def layers(choices: Mapping[str, GemmChoice]) -> None:
        for i in range(CHAIN_LAYERS):
            w = {name: bench.linears[i % len(bench.linears)] for name, bench in benches.items()}
            ops._linear(ops.norm(h, norm, BF16), None, w["qkv"], choices["qkv"])
            ops._linear_add(attended, w["o"], h, None, choices["o"])
            middle = ops._gate_up(ops.norm(h, norm, BF16), None, w["gate-up"], choices["gate-up"])
            ops._linear_add(middle, w["down"], h, None, choices["down"])

    cases: dict[str, Mapping[str, GemmChoice]] = {"cuBLAS": dict.fromkeys(winners), "winners": winners}
    for prefetch, late in itertools.product((0, 1024, 4096), (False, True)):
        cases[f"prefetch {prefetch}{' late' if late else ''}"] = {
            name: replace(config, prefetch=prefetch, late=late) for name, config in winners.items()
        }
    spent = {name: best_us(lambda c=choices: layers(c)) / CHAIN_LAYERS for name, choices in cases.items()}
    print(f"layer, {rows} rows, without rotary and attention, µs: " + ", ".join(f"{n} {t:.1f}" for n, t in spent.items()), flush=True)
    return spent


def sweep(rows: Sequence[int], record: Record) -> None:
    """Run the whole sweep; print and record along the way."""
    from runtime.layers.cuda_ops import CudaOps

    compile_all(rows)
    norm = RMSNorm(torch.ones(SHAPE.hidden, dtype=BF16, device="cuda"), 1e-5)
    ops, rate = CudaOps(GemmTimings(H200), pdl=True), read_rate(record.data["machine"])
    benches = {gemm.name: Bench(ops, gemm, norm) for gemm in GEMMS}
    for m in rows:
        winners: dict[str, TritonConfig] = {}
        for name, bench in benches.items():
            times = sweep_one(bench, m)
            if not (fastest := best(times, 1)):
                raise SystemExit(f"{name}, {m} rows: no configuration fits and agrees with cuBLAS")
            winners[name] = fastest[0]
            record.add(row(bench.gemm, m, times, rate))
        times = {name: round(spent, 2) for name, spent in chain(benches, m, winners).items()}
        record.add({"gemm": "layer", "rows": m, "us": times})


def main(argv: Sequence[str] | None = None) -> None:
    """Sweep and record."""
    parser = arguments("gemms", __doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 32], help="rows of x")
    args = parse_on_gpu(parser, argv)
    from runtime.layers.gemm.triton_gemm import MAX_ROWS

    if max(args.rows) > MAX_ROWS:
        parser.error(f"--rows {max(args.rows)}: the Triton GEMM takes at most {MAX_ROWS} rows")
    with torch.inference_mode():
        sweep(args.rows, Record(NAME, KEYS, args.out))


if __name__ == "__main__":
    main()
