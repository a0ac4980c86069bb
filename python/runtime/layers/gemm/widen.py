"""Converts an FP8 weight to 16 bits in one pass, for cuBLAS GEMMs of many rows."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from runtime.layers.kernels.scale_layout import scale_layout
from runtime.layers.linear import Linear

ROWS, COLUMNS = 16, 256


def widened_linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """`linear(x)` by cuBLAS; an e4m3 weight is converted first."""
    scale = linear.storage.scale
    return linear(x) if not linear.is_scaled or scale is None else F.linear(x, widen(linear.weight, scale, x.dtype), linear.bias)


def widen(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 [N, K] times its float32 scales, rounded to `dtype`; `scale` as in `scale_layout`."""
    N, K = weight.shape
    out = torch.empty((N, K), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS))
    _widen_kernel[grid](weight, scale, out, N, K, *scale_layout(N, K, scale), BLOCK_N=ROWS, BLOCK_K=COLUMNS, num_warps=4)
    return out


@triton.jit
def _widen_kernel(
    w_ptr, scale_ptr, out_ptr, N, K, row_scales, scale_rows, scale_columns, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """One program: one tile."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (n < N) & (k < K)
    at = n.to(tl.int64) * K + k
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + n // scale_rows * row_scales + k // scale_columns, mask=inside, other=0.0)
    tl.store(out_ptr + at, (w * scale).to(out_ptr.dtype.element_ty), mask=inside)
