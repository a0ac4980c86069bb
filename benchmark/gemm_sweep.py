"""Every cut of the small matrix product that might win, for each product of Llama-3-8B, timed in graphs behind the kernels it follows.

Compiles in many processes into Triton's cache, then times: first the cuts, then how far the best prefetch and when they let the next kernel
start, then whole layers with the winners.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import MockTensor

from runtime.layers.cuda_ops import CudaOps
from runtime.layers.epilogue import Epilogue
from runtime.layers.gemm_choice import Choice, GemmOp, describe, row_class
from runtime.layers.linear import Linear
from runtime.layers.ops import RMSNorm
from runtime.layers.small_gemm import GemmConfig, padded_rows, small_gemm

HIDDEN, MIDDLE, VOCAB, QKV = 4096, 14336, 128256, 6144
BF16 = torch.bfloat16
SHARED_MEMORY = 227 << 10
ENOUGH_BYTES = 400 << 20
REPLAYS = 5
TOLERANCE = 1e-2
PREFETCHES = (0, 512, 2048, 4096)
CHAIN_LAYERS = 6
CUTS = (
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
"""Weight rows, columns, warps, stages."""


@dataclass(frozen=True)
class Shape:
    """One product of a layer: the most and least weight rows of a tile that leave enough programs."""

    name: str
    op: GemmOp
    out: int
    width: int
    tiles: tuple[int, ...]


SHAPES = (
    Shape("qkv", "linear", QKV, HIDDEN, (16, 32, 64)),
    Shape("o", "linear_add", HIDDEN, HIDDEN, (16, 32)),
    Shape("gate-up", "gate_up", 2 * MIDDLE, HIDDEN, (32, 64, 128, 256)),
    Shape("down", "linear_add", HIDDEN, MIDDLE, (16, 32)),
    Shape("head", "logits", VOCAB, HIDDEN, (32, 64, 128, 256)),
)


def cuts(shape: Shape, rows: int) -> Iterator[GemmConfig]:
    """What fits the machine and might win."""
    for (block_n, block_k, warps, depths), swap, tma in itertools.product(CUTS, (False, True), (False, True)):
        if block_n not in shape.tiles:
            continue
        for stages in depths:
            config = GemmConfig(block_n, block_k, warps, stages, swap, tma)
            if stages * block_k * 2 * (block_n + padded_rows(rows, swap)) <= SHARED_MEMORY:
                yield config


def compile_one(job: tuple[GemmOp, int, GemmConfig]) -> str:
    """In a process of its own: put one kernel into Triton's cache."""
    op, rows, config = job
    out_dtype = torch.float32 if op in ("linear_add", "logits") else BF16
    x, weight = MockTensor(BF16, [rows, HIDDEN]), MockTensor(BF16, [HIDDEN, HIDDEN])
    epilogue = Epilogue(silu=op == "gate_up", add=op == "linear_add")
    out = MockTensor(out_dtype, [rows, epilogue.columns(HIDDEN)])
    try:
        small_gemm(x, weight, out, config, epilogue, pdl=True, launch=False)  # type: ignore[arg-type]
    except Exception as error:  # a cut that does not compile is a result
        return f"{op} {rows} {config}: {type(error).__name__} {str(error)[:200]}"
    return ""


def compile_all(rows: list[int]) -> None:
    jobs = {(s.op, padded_rows(m, c.swap) if m > 8 else 1, c) for s in SHAPES for m in rows for c in cuts(s, m)}
    start = time.perf_counter()
    workers = max((os.cpu_count() or 2) - 1, 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failed = [line for line in pool.map(compile_one, jobs, chunksize=4) if line]
    print(f"compiled {len(jobs)} kernels, {len(failed)} failed, {time.perf_counter() - start:.0f} s", flush=True)
    for line in failed[:8]:
        print("  failed:", line)


def microseconds(run: Callable[[], object]) -> float:
    """Best of graph replays, so that a hiccup picks no winner."""
    run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        run()
        graph.capture_end()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1000


class Bench:
    """Weights of one product and a way to time one choice for it."""

    def __init__(self, ops: CudaOps, shape: Shape, norm: RMSNorm) -> None:
        count = max(-(-ENOUGH_BYTES // (shape.out * shape.width * 2)), 2 if shape.name != "head" else 1)
        self.ops, self.shape, self.norm = ops, shape, norm
        self.linears = [
            Linear(torch.empty((shape.out, shape.width), dtype=BF16, device="cuda").normal_(std=shape.width**-0.5)) for _ in range(count)
        ]
        self.calls = self.linears * 2
        self._wanted: dict[int, torch.Tensor] = {}  # by cuBLAS, which is timed first

    def time(self, rows: int, choice: Choice) -> float | None:
        """Microseconds a product with the norm before it, or None where it does not fit or is wrong."""
        generator = torch.Generator("cuda").manual_seed(rows)
        h = torch.randn((rows, HIDDEN), device="cuda", generator=generator)
        x = torch.randn((rows, self.shape.width), device="cuda", generator=generator).to(BF16)
        scores = torch.empty((rows, self.shape.out if self.shape.op == "logits" else 1), device="cuda")
        try:
            got = self._one(h.clone(), x, scores, self.linears[0], choice).float().clone()
            spent = microseconds(lambda: [self._one(h, x, scores, linear, choice) for linear in self.calls]) / len(self.calls)
        except OutOfResources:
            return None
        want = self._wanted.setdefault(rows, got)
        if not float((got - want).norm() / want.norm()) < TOLERANCE:
            print(f"WRONG: {self.shape.name} M={rows} {describe(choice)}", flush=True)
            return None
        return spent

    def _one(self, h: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, linear: Linear, choice: Choice) -> torch.Tensor:
        ops, op = self.ops, self.shape.op
        if op == "linear":
            return ops._linear(ops.norm(h, self.norm, BF16), None, linear, choice)
        if op == "gate_up":
            return ops._gate_up(ops.norm(h, self.norm, BF16), None, linear, choice)
        return ops._logits(x, linear, scores, choice) if op == "logits" else ops._linear_add(x, linear, h, None, choice).h


def best(times: dict[Choice, float], count: int) -> list[GemmConfig]:
    return sorted((c for c in times if isinstance(c, GemmConfig)), key=lambda c: times[c])[:count]


def sweep_one(bench: Bench, rows: int, start: float) -> tuple[dict[Choice, float], GemmConfig]:
    """Time one product's cuts, then the best ones' prefetching; print the top."""
    tried: list[Choice] = [None, *cuts(bench.shape, rows)]
    times = {c: t for c in tried if (t := bench.time(rows, c)) is not None}
    for config in best(times, 3):
        for prefetch, late in itertools.product(PREFETCHES, (False, True)):
            variant = replace(config, prefetch=prefetch, late=late)
            times[variant] = bench.time(rows, variant) or float("inf")
    size = bench.shape.out * bench.shape.width * 2
    kinds = {f"{'swap ' if s else ''}{'tma' if t else ''}".strip() or "plain": (s, t) for s in (False, True) for t in (False, True)}
    plain = {c: t for c, t in times.items() if isinstance(c, GemmConfig) and c.prefetch == 1024 and not c.late}
    lines = [f"cuBLAS {times[None]:.1f}"]
    for name, kind in kinds.items():
        own = [(t, c) for c, t in plain.items() if (c.swap, c.tma) == kind]
        if own:
            spent, config = min(own, key=lambda pair: pair[0])
            lines.append(f"{name} {spent:.1f} ({config})")
    print(f"[{time.perf_counter() - start:.0f} s] {bench.shape.name} M={rows}: " + "; ".join(lines), flush=True)
    for config in best(times, 4):
        print(f"    {times[config]:.2f} µs {size / times[config] / 1e6:.2f} TB/s  {config}", flush=True)
    return times, best(times, 1)[0]


def chain(benches: dict[str, Bench], rows: int, winners: dict[str, GemmConfig]) -> None:
    """Whole layers without attention and rotary: the winners as they are, and with one way of prefetching for all."""
    ops, norm = benches["qkv"].ops, benches["qkv"].norm
    h = torch.randn((rows, HIDDEN), device="cuda")
    mixed = torch.randn((rows, HIDDEN), device="cuda").to(BF16)

    def layers(choices: dict[str, Choice]) -> None:
        for i in range(CHAIN_LAYERS):
            w = {name: bench.linears[i % len(bench.linears)] for name, bench in benches.items()}
            ops._linear(ops.norm(h, norm, BF16), None, w["qkv"], choices["qkv"])
            ops._linear_add(mixed, w["o"], h, None, choices["o"])
            middle = ops._gate_up(ops.norm(h, norm, BF16), None, w["gate-up"], choices["gate-up"])
            ops._linear_add(middle, w["down"], h, None, choices["down"])

    cases: dict[str, dict[str, Choice]] = {"cuBLAS": dict.fromkeys(winners), "winners": dict(winners)}
    for prefetch, late in itertools.product((0, 1024, 4096), (False, True)):
        cases[f"prefetch {prefetch}{' late' if late else ''}"] = {
            name: replace(config, prefetch=prefetch, late=late) for name, config in winners.items()
        }
    spent = {name: microseconds(lambda c=choices: layers(c)) / CHAIN_LAYERS for name, choices in cases.items()}
    print(f"layer M={rows}, without rotary and attention, µs: " + ", ".join(f"{n} {t:.1f}" for n, t in spent.items()), flush=True)


def sweep(rows: list[int]) -> dict[str, object]:
    """The whole sweep: prints as it goes; every time in the result."""
    start = time.perf_counter()
    compile_all(rows)
    norm = RMSNorm(torch.ones(HIDDEN, dtype=BF16, device="cuda"), 1e-5)
    ops = CudaOps(pdl=True)
    benches = {shape.name: Bench(ops, shape, norm) for shape in SHAPES}
    table: list[dict[str, object]] = []
    for m in rows:
        winners: dict[str, GemmConfig] = {}
        for name, bench in benches.items():
            times, winners[name] = sweep_one(bench, m, start)
            table += [
                {"product": name, "rows": m, "us": round(spent, 2), "name": describe(c), "config": asdict(c) if c else None}
                for c, spent in sorted(times.items(), key=lambda item: item[1])
            ]
        chain(benches, m, winners)
    print(f"sweep took {time.perf_counter() - start:.0f} s", flush=True)
    return {"sweep": table, "row_classes": [row_class(m) for m in rows]}
