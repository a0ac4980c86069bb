"""Whether a GPU multiplies the rows of prompts faster, and correctly, when they are quantized to e4m3."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from runtime.layers.gemm.quantized_rows import quantized_gemm, supports
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.gemm.widen import widen
from runtime.layers.kernels.graph_timer import median_micros
from runtime.layers.linear import Linear

ROWS = 2048
"""Rows of the trial: those of a chunk."""
TOLERANCE = 0.05
"""Maximum relative error against rows in bfloat16; rounding to e4m3 leaves 0.026."""
REPLAYS = 5


WeightKind = tuple[str, int, int]
"""Scheme, rows and columns, on which the choice depends."""


def kind_of(linear: Linear) -> WeightKind:
    """The kind of a layer's weight."""
    return linear.scheme.name, linear.out_features, linear.in_features


def choose_quantized(linears: Iterable[Linear], timings: GemmTimings) -> dict[WeightKind, tuple[bool, str]]:
    """Whether prompts quantize their rows, and a line about it, for each kind of e4m3 weights with a GEMM in torch."""
    found: dict[WeightKind, tuple[bool, str]] = {}
    for kind, linear in {kind_of(linear): linear for linear in linears if linear.is_scaled}.items():
        weight, scale = linear.weight, linear.storage.scale
        if timings.tuning.fp8_activations and scale is not None and supports(weight, scale):
            found[kind] = timings.keep_quantized(kind, lambda w=weight, s=scale: time_quantized(w, s))
    return found


def time_quantized(weight: torch.Tensor, scale: torch.Tensor) -> tuple[bool, str]:
    """Whether it is faster for e4m3 `weight` [N, K], and a line that says so or why it is not possible."""
    x = torch.randn((ROWS, weight.shape[1]), device=weight.device).to(torch.bfloat16)
    want = F.linear(x, widen(weight, scale, x.dtype))
    try:
        got = quantized_gemm(x, weight, scale)
    except RuntimeError as error:  # torch refuses the scales or the GPU
        return False, f"bfloat16 rows: {str(error).splitlines()[0]}"
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < TOLERANCE:
        return False, f"bfloat16 rows: those in e4m3 differ by {error:.3f}"
    wide, narrow = (
        median_micros(run, REPLAYS)
        for run in (lambda: F.linear(x, widen(weight, scale, x.dtype)), lambda: quantized_gemm(x, weight, scale))
    )
    return narrow < wide, f"{'e4m3' if narrow < wide else 'bfloat16'} rows ({narrow:.0f} and {wide:.0f} µs for {ROWS})"
