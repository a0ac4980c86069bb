"""Which kernel computes each matrix product of few rows: a rule, or what was fastest on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from triton.runtime.errors import OutOfResources

from runtime.layers.gemm.triton_gemm import MAX_ROWS, GemmConfig
from runtime.layers.gemm.wgmma_gemm import MAX_TILE, StreamedConfig
from runtime.layers.kernels.graph_timer import replay_times

GemmOp = Literal["linear", "linear_add", "gate_up", "logits"]
Choice = GemmConfig | StreamedConfig | None
"""How one product is computed: the Triton kernel so cut, the streamed one so cut, or cuBLAS with separate kernels after it."""
Key = tuple[GemmOp, int, int, int]
"""Operation, rows and columns of the weight, row class."""
ROW_CLASSES = (1, 4, 8, 16, 32, 64, MAX_ROWS)
"""A product of M rows is chosen for as one of the next of these."""
REPLAYS = 5
ENOUGH_BYTES = 400 << 20
"""Weights to go through when timing; several times any L2, so that each product reads memory as it will in the model."""


def row_class(rows: int) -> int:
    """The class of `rows`, 1..MAX_ROWS."""
    return next(most for most in ROW_CLASSES if rows <= most)


def default_choice(op: GemmOp, rows: int) -> Choice:
    """The rule for products that were not timed: Triton up to 32 rows, from the measurements on an H200."""
    return None if rows > 32 else candidate_configs(op, rows)[0]


def candidate_configs(op: GemmOp, rows: int) -> tuple[GemmConfig, ...]:
    """Ways to cut worth timing against cuBLAS, the likeliest first: the fastest of a sweep over Llama-3-8B's products on an H200.

    Much prefetching slows the chain of kernels where a product is large; where it is small, the first columns are worth it.
    """
    few, some = rows <= 8, rows <= 16
    if rows > 64:
        if op in ("gate_up", "logits"):
            return GemmConfig(256, 64, 8, 4, swap=True, prefetch=0), GemmConfig(128, 64, 8, 4, swap=True, prefetch=0)
        return GemmConfig(32, 128, 4, 4, prefetch=0), GemmConfig(64, 64, 4, 6, swap=True, prefetch=0)
    if rows > 32 and op in ("linear", "linear_add"):  # deeper tiles would not fit beside 64 rows of input
        return GemmConfig(64, 128, 4, 6, swap=True, prefetch=0), GemmConfig(32, 256, 4, 4, swap=True, prefetch=512)
    shallow = (GemmConfig(128, 64, 8, 4, swap=True, prefetch=0),) if rows > 32 else ()
    if op == "gate_up":
        wide = GemmConfig(128, 128, 4, 4, swap=True, prefetch=0)
        if few:
            return GemmConfig(64, 256, 4, 3, prefetch=0), GemmConfig(64, 256, 4, 3, tma=True, late=True, prefetch=0)
        half = GemmConfig(64, 128, 4, 4, swap=True, prefetch=0)
        return (half, wide) if some else (wide, half, *shallow)
    if op == "logits":
        if few:
            return GemmConfig(32, 128, 2, 6, prefetch=0), GemmConfig(64, 256, 4, 4, swap=True, tma=True, prefetch=0)
        half, wide = GemmConfig(64, 128, 4, 5, swap=True, prefetch=0), GemmConfig(128, 128, 4, 4, swap=True, prefetch=0)
        return (half, wide) if some else (wide, half, *shallow)
    if op == "linear":
        if few:
            return GemmConfig(16, 256, 2, 6, swap=True, prefetch=512), GemmConfig(16, 256, 2, 4, swap=True, prefetch=0)
        return GemmConfig(64, 128, 4, 6, swap=True, prefetch=0), GemmConfig(64, 256, 4, 4, swap=True, prefetch=0)
    if some:
        return GemmConfig(16, 256, 2, 6, prefetch=512), GemmConfig(16, 256, 2, 6, swap=True, prefetch=512)
    return GemmConfig(32, 512, 4, 3, swap=True, prefetch=512), GemmConfig(32, 256, 4, 5, swap=True, tma=True, prefetch=0)


def streamed_configs(op: GemmOp, rows: int, weight_rows: int, num_sms: int) -> tuple[StreamedConfig, ...]:
    """Ways to cut for the streamed kernel worth timing: tiles that fill the multiprocessors evenly, whole or in halves.

    Up to 32 rows Triton's cuts are as fast, on an H200, but for plain products.
    """
    if rows <= 32 and op != "linear":
        return ()
    outputs, halves = (weight_rows // 2, 2) if op == "gate_up" else (weight_rows, 1)

    def even(programs: int, multiple: int) -> int:
        return halves * (-(-outputs // (programs * multiple)) * multiple)

    if op in ("linear", "linear_add"):
        found = [StreamedConfig(even(num_sms // split, 8 * split), split) for split in (1, 2)]
    else:
        turns = -(-weight_rows // (num_sms * MAX_TILE))
        found = [StreamedConfig(even(turns * num_sms, 8))]
        if op == "gate_up":
            found.append(StreamedConfig(even(2 * turns * num_sms, 8)))
    return tuple(config for config in found if config.tile <= MAX_TILE)


def describe(choice: Choice) -> str:
    """For the log and for tables."""
    return "cuBLAS" if choice is None else f"Triton {choice}" if isinstance(choice, GemmConfig) else str(choice)


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
    def all_calls() -> None:  # what one call makes is gone before the next, as in a model
        for call in range(calls):
            run(call)

    try:
        run(0)
    except OutOfResources:
        return None
    return statistics.median(replay_times(all_calls, REPLAYS)) / calls
