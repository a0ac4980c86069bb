"""Converts a weight in FP8 or int4 to 16 bits in one pass, for cuBLAS GEMMs of many rows."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from runtime.layers.kernels.scale_layout import scale_layout
from runtime.layers.kernels.weight_step import widen_int4
from runtime.layers.linear import Linear

ROWS, COLUMNS = 16, 256


def widened_linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """`linear(x)` by cuBLAS; an e4m3 or int4 weight is converted first."""
    scale = linear.storage.scale
    if scale is None or not (linear.is_scaled or linear.is_int4):
        return linear(x)
    return F.linear(x, widen(linear.weight, scale, x.dtype), linear.bias)


def widen(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value of e4m3 [N, K], or of int4 in uint8 [N, K / 2], with the scales of `scale_layout`: [N, K], rounded to `dtype`."""
    N, K = weight.shape
    if weight.dtype is torch.uint8:
        out = torch.empty((N, 2 * K), dtype=dtype, device=weight.device)
        _widen_int4_kernel[(triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS))](
            weight, scale, out, N, K, scale.shape[1], K // scale.shape[1], BLOCK_N=ROWS, BLOCK_K=COLUMNS, num_warps=4
        )
        return out
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


@triton.jit
def _widen_int4_kernel(w_ptr, scale_ptr, out_ptr, N, K, groups, group_bytes, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program: one tile of bytes, with two codes each. `K`: bytes of a row."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    byte = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (n < N) & (byte < K)
    packed = tl.load(w_ptr + n.to(tl.int64) * K + byte, mask=inside, other=0)
    numbers = scale_ptr + 2 * (n * groups + byte // group_bytes)
    scale = tl.load(numbers, mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(numbers + 1, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + 2 * n.to(tl.int64) * K + byte // 16 * 32 + byte % 16
    tl.store(at, widen_int4(packed & 15, scale, minimum, out_ptr.dtype.element_ty), mask=inside)
    tl.store(at + 16, widen_int4(packed >> 4, scale, minimum, out_ptr.dtype.element_ty), mask=inside)
