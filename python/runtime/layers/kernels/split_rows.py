"""Rows of states as two halves in int8, as a Triton kernel."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers import bounded_head
from runtime.layers.bounded_head import SplitRows
from runtime.layers.kernels.pdl import launch_options, pdl_sync

LEVELS, HALVES = tl.constexpr(float(bounded_head.LEVELS)), tl.constexpr(float(bounded_head.HALVES))
ROUNDING, NORM_ROUNDING = tl.constexpr(bounded_head.ROUNDING), tl.constexpr(bounded_head.NORM_ROUNDING)
TINY = tl.constexpr(bounded_head.TINY)


def split_rows(x: torch.Tensor, largest: float, *, pdl: bool = False) -> SplitRows:
    """`bounded_head.split_rows` of x bfloat16 [M, K] contiguous; `pdl` as in `triton_gemm`."""
    M, K = x.shape
    assert x.is_contiguous(), "expected contiguous rows"
    halves = torch.empty((2 * M, K), dtype=torch.int8, device=x.device)
    rows = torch.empty((3, M), dtype=torch.float32, device=x.device)
    _split_kernel[(M,)](x, halves, rows, largest, K, WIDTH=triton.next_power_of_2(K), PDL=pdl, num_warps=4, **launch_options(pdl))
    return SplitRows(halves, *rows)


@triton.jit(do_not_specialize=["largest"])
def _split_kernel(x_ptr, halves_ptr, rows_ptr, largest, K, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """One program: one row."""
    pdl_sync(PDL)
    row, rows = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, WIDTH)
    inside = k < K
    x = tl.load(x_ptr + row.to(tl.int64) * K + k, mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(x), 0), 1e-30) / (LEVELS * HALVES)
    units = x / step
    high = tl.floor(units / HALVES + 0.5)
    low = tl.minimum(tl.maximum(tl.floor(units - HALVES * high + 0.5), -LEVELS), LEVELS)
    rest = x - step * (HALVES * high + low)
    norm = tl.sqrt(tl.sum(x * x, 0)) * NORM_ROUNDING + TINY
    left = tl.sqrt(tl.sum(rest * rest, 0)) * NORM_ROUNDING + TINY
    at = halves_ptr + 2 * row.to(tl.int64) * K + k
    tl.store(at, high.to(tl.int8), mask=inside)
    tl.store(at + K, low.to(tl.int8), mask=inside)
    tl.store(rows_ptr + row, step)
    tl.store(rows_ptr + rows + row, norm)
    tl.store(rows_ptr + 2 * rows + row, largest * (left + ROUNDING * norm))
