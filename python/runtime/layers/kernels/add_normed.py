"""One Triton kernel that adds rows, or their norm, to the residual stream and applies the next norm."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.kernels.rms_norm import WIDE
from runtime.layers.norm import RMSNorm


def add_normed_rows(
    x: torch.Tensor, norm: RMSNorm | None, h: torch.Tensor, next_norm: RMSNorm | None, factor: torch.Tensor | None, pdl: bool
) -> torch.Tensor | None:
    """`h = (h + norm(x)) * factor` in place.

    Args:
        x: [T, hidden] contiguous, 16 bits.
        norm: None to add `x` itself.
        h: float32 [T, hidden] contiguous.
        factor: [1], 16 bits; None for 1.
        pdl: as in `triton_gemm`.

    Returns:
        `next_norm(h)` [T, hidden], the dtype of `x`; None without `next_norm`.
    """
    T, hidden = h.shape
    normed = None if next_norm is None else torch.empty_like(x)
    _add_normed_kernel[(T,)](
        x, None if norm is None else norm.weight, h, None if next_norm is None else next_norm.weight, normed, factor, hidden,
        0.0 if norm is None else norm.eps, 0.0 if next_norm is None else next_norm.eps, BLOCK=triton.next_power_of_2(hidden),
        NORM=norm is not None, NEXT=next_norm is not None, FACTOR=factor is not None, PDL=pdl, num_warps=8 if hidden >= WIDE else 4,
        **launch_options(pdl),
    )  # fmt: skip
    return normed


@triton.jit
def _add_normed_kernel(
    x_ptr, weight_ptr, h_ptr, next_weight_ptr, normed_ptr, factor_ptr, hidden, eps, next_eps,
    BLOCK: tl.constexpr, NORM: tl.constexpr, NEXT: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program processes one row."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    gain = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) if NORM else 1.0
    pdl_sync(PDL)
    at = tl.program_id(0).to(tl.int64) * hidden + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + at, mask=inside, other=0.0)
    if NORM:
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden + eps)) * gain
    h += x
    if FACTOR:
        h *= tl.load(factor_ptr).to(tl.float32)
    tl.store(h_ptr + at, h, mask=inside)
    if NEXT:
        next_gain = tl.load(next_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / hidden + next_eps)
        tl.store(normed_ptr + at, (h * scale * next_gain).to(normed_ptr.dtype.element_ty), mask=inside)
