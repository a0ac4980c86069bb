"""Which kernel computes each matrix product of few rows: a rule, or what was fastest on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from triton.runtime.errors import OutOfResources

from runtime.layers.small_gemm import MAX_ROWS, GemmConfig, padded_rows

GemmOp = Literal["norm_linear", "linear_add", "norm_gate_up", "logits"]
ROW_CLASSES = (1, 4, 8, 16, 32, MAX_ROWS)
"""A product of M rows is chosen for as one of the next of these."""
FOLDED_ROWS = 4
"""Up to this many rows every program norms them itself, as a rule; above, reading them in float32 costs more than one kernel for all."""
NARROW = 8192
"""Weight rows below which narrow tiles are needed to give each multiprocessor work."""
REPLAYS = 5
ENOUGH_BYTES = 400 << 20
"""Weights to go through when timing; several times any L2, so that each product reads memory as it will in the model."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one product is computed.

    Attributes:
        config: of the Triton kernel, or None for cuBLAS with separate kernels around it.
        fold_norm: whether the norm before the product is part of the kernel.
    """

    config: GemmConfig | None
    fold_norm: bool = False

    def __str__(self) -> str:
        if self.config is None:
            return "cuBLAS"
        c = self.config
        return f"Triton {c.block_n}x{c.block_k} warps {c.num_warps} stages {c.stages}{' norm folded' if self.fold_norm else ''}"


CUBLAS = Choice(None)
Key = tuple[GemmOp, int, int, int]
"""Operation, rows and columns of the weight, row class."""


def row_class(rows: int) -> int:
    """The class of `rows`, 1..64."""
    return next(most for most in ROW_CLASSES if rows <= most)


def default_choice(op: GemmOp, out_features: int, rows: int, dtype: torch.dtype) -> Choice:
    """The rule for products that were not timed: Triton up to 32 rows, from the measurements on an H200."""
    if rows > 32:
        return CUBLAS
    return Choice(candidate_configs(op, out_features, rows)[0], rows <= FOLDED_ROWS and can_fold(op, rows, dtype))


def candidates(op: GemmOp, out_features: int, rows: int, dtype: torch.dtype) -> list[Choice]:
    """What is worth timing."""
    folds = (True, False) if can_fold(op, rows, dtype) else (False,)
    return [CUBLAS, *(Choice(config, fold) for config in candidate_configs(op, out_features, rows) for fold in folds)]


def can_fold(op: GemmOp, rows: int, dtype: torch.dtype) -> bool:
    """Whether the kernel may do the norm itself: float16 lacks the range, and many rows would be read too often."""
    return op in ("norm_linear", "norm_gate_up") and rows <= 2 * FOLDED_ROWS and dtype is torch.bfloat16


def candidate_configs(op: GemmOp, out_features: int, rows: int) -> tuple[GemmConfig, ...]:
    """Ways to cut worth timing, the likeliest first.

    Folding costs instructions for each tile of x, whatever its rows: tiles of 16 weight rows would then be bound by them (counted in SASS).
    """
    if padded_rows(rows) > 16:
        return GemmConfig(32, 128, 4, 4), GemmConfig(64, 128, 4, 4)
    if op == "norm_gate_up":
        return GemmConfig(32, 128, 4, 4), GemmConfig(64, 64, 4, 4)
    narrow, wide = GemmConfig(16, 256, 4, 5), GemmConfig(32, 128, 4, 6)
    if op == "linear_add" and out_features < NARROW:
        return narrow, wide
    return wide, narrow if out_features < NARROW else GemmConfig(64, 128, 4, 4)


def fastest(runs: Mapping[Choice, Callable[[int], object]], calls: int) -> tuple[Choice, dict[Choice, float]]:
    """Time each way as a captured graph of `calls` calls.

    Args:
        runs: call number -> one product; the number picks the weight, so that successive calls read different memory.
        calls: products of one graph.

    Returns:
        The fastest, and microseconds a product of each that fits the machine (a configuration that needs too much shared memory does not).
    """
    times = {choice: time for choice, run in runs.items() if (time := _microseconds(run, calls)) is not None}
    return min(times, key=times.__getitem__), times


def rotation(weights: Sequence[torch.Tensor]) -> int:
    """How many of these weights to go through before starting over."""
    total = 0
    for count, weight in enumerate(weights, 1):
        total += weight.nbytes
        if total >= ENOUGH_BYTES:
            return count
    return len(weights)


def _microseconds(run: Callable[[int], object], calls: int) -> float | None:
    try:
        run(0)
    except OutOfResources:
        return None
    # Without `torch.cuda.graph`, which empties the allocator's cache at each of the many captures.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for call in range(calls):
            run(call)
        graph.capture_end()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spans = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return spans[len(spans) // 2] * 1000 / calls
