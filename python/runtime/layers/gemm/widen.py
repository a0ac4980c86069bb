"""Converts a weight in FP8 or int4 to 16 bits in one pass, for cuBLAS GEMMs of many rows."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from runtime.layers.kernels.scale_layout import num_columns, scale_layout
from runtime.layers.kernels.weight_step import widen_int4
from runtime.layers.linear import Linear

ROWS, COLUMNS = 16, 256


def widened_linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """`linear(x)` by cuBLAS; an e4m3 or int4 weight is converted first."""
    scale = linear.storage.scale
    if scale is None or not (linear.is_scaled or linear.is_int4):
        return linear(x)
    return F.linear(linear.storage.in_order(x), widen(linear.weight, scale, x.dtype), linear.bias)


def widen(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value of e4m3 [N, K], or of int4 in uint8 [N, K / 2], with the scales of `scale_layout`: [N, K], rounded to `dtype`."""
    N, K = len(weight), num_columns(weight)
    out = torch.empty((N, K), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS))
    if weight.dtype is torch.uint8:
        groups = scale.shape[1]
        _widen_int4_kernel[grid](weight, scale, out, N, K, groups, K // 32 // groups, BLOCK_N=ROWS, RUNS=COLUMNS // 32, num_warps=4)
        return out
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
def _widen_int4_kernel(w_ptr, scale_ptr, out_ptr, N, K, groups, runs_per_group, BLOCK_N: tl.constexpr, RUNS: tl.constexpr):
    """One program: one tile of `RUNS` runs of 16 bytes with two codes each, which are 32 columns. `K`: columns of a row."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)[None, :]
    inside = (n < N) & (run < K // 32)
    numbers = scale_ptr + 2 * (n * groups + run // runs_per_group)
    scale = tl.load(numbers, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    zero = tl.load(numbers + 1, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    at = w_ptr + (n.to(tl.int64) * (K // 2) + run * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
    packed = tl.load(at, mask=inside[:, :, None], other=0)
    low = widen_int4(packed & 15, scale, zero, out_ptr.dtype.element_ty)
    high = widen_int4(packed >> 4, scale, zero, out_ptr.dtype.element_ty)
    both = tl.permute(tl.join(low, high), (0, 1, 3, 2)).reshape(BLOCK_N, RUNS * 32)
    rows, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None], tl.program_id(1) * (RUNS * 32) + tl.arange(0, RUNS * 32)[None, :]
    tl.store(out_ptr + rows.to(tl.int64) * K + k, both, mask=(rows < N) & (k < K))
