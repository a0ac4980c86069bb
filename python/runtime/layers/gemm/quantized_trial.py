"""Decides by a trial whether prompts multiply rows in e4m3: if that is faster on this GPU, and accurate enough."""

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
"""Rows of the trial, as in a prompt chunk."""
TOLERANCE = 0.05
"""Maximum relative error against bfloat16 rows; correct rounding to e4m3 gives 0.026."""
REPLAYS = 5


WeightKind = tuple[str, int, int]
"""Scheme, rows and columns of a weight, on which the choice depends."""


def kind_of(linear: Linear) -> WeightKind:
    """The kind of a layer's weight."""
    return linear.scheme.name, linear.out_features, linear.in_features


def choose_quantized(linears: Iterable[Linear], timings: GemmTimings) -> dict[WeightKind, tuple[bool, str]]:
    """Whether prompts quantize their rows, and a line for reports, for each kind of e4m3 weight that torch can multiply by."""
    found: dict[WeightKind, tuple[bool, str]] = {}
    for kind, linear in {kind_of(linear): linear for linear in linears if linear.is_scaled}.items():
        weight, scale = linear.weight, linear.storage.scale
        if timings.tuning.fp8_activations and scale is not None and supports(weight, scale):
            found[kind] = timings.keep_quantized(kind, lambda w=weight, s=scale: time_quantized(w, s))
    return found


def time_quantized(weight: torch.Tensor, scale: torch.Tensor) -> tuple[bool, str]:
    """Whether e4m3 rows are faster for e4m3 `weight` [N, K], and a line with the times or the reason why they are not possible."""
    x = torch.randn((ROWS, weight.shape[1]), device=weight.device).to(torch.bfloat16)
    want = F.linear(x, widen(weight, scale, x.dtype))
    try:
        got = quantized_gemm(x, weight, scale)
    except RuntimeError as error:  # torch refuses the scales or the GPU
        return False, f"bfloat16 rows: {str(error).splitlines()[0]}"
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < TOLERANCE:
        return False, f"bfloat16 rows: the relative error of e4m3 rows is {error:.3f}"
    wide = median_micros(lambda: F.linear(x, widen(weight, scale, x.dtype)), REPLAYS)
    narrow = median_micros(lambda: quantized_gemm(x, weight, scale), REPLAYS)
    return narrow < wide, f"{'e4m3' if narrow < wide else 'bfloat16'} rows ({narrow:.0f} and {wide:.0f} µs for {ROWS})"
