"""The GEMM of a head with bounds, in Triton: int8 by int8, of which each tile of tokens keeps its largest bounds."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.config.kernel_configs import TritonConfig
from runtime.layers import bounded_head
from runtime.layers.bounded_head import BoundedHead, SplitRows
from runtime.layers.gemm.triton_gemm import padded_rows
from runtime.layers.kernels.argmax_reduce import NO_COLUMN
from runtime.layers.kernels.bounds import proved_argmax
from runtime.layers.kernels.pdl import launch_options
from runtime.layers.kernels.split_rows import split_rows

KEPT = tl.constexpr(2)
"""Tokens that a tile keeps."""
HALVES = tl.constexpr(float(bounded_head.HALVES))


def proved_best(
    x: torch.Tensor, head: BoundedHead, config: TritonConfig, pdl: bool, out: torch.Tensor, logits: torch.Tensor | None
) -> torch.Tensor:
    """int64 [M] in `out`: the argmax of each row of `x @ weight.T`, with the head's own weights.

    Args:
        x: bfloat16 [M, K] contiguous, M <= 64.
        head: a head that has its copy.
        config: the tiling of the GEMM in int8.
        pdl: as in `triton_gemm`.
        logits: float32 [M, V] contiguous; receives the logit of each row's token if given.
    """
    rows = split_rows(x, head.largest, pdl=pdl)
    found = tile_bounds(rows, head, config, pdl)
    return proved_argmax(found.bounds, found.columns, found.rest, rows.error, x, head.own.weight, head.stride, out, pdl, logits)


@dataclass(frozen=True, slots=True)
class TileBounds:
    """The largest bounds of each tile.

    Attributes:
        bounds: float32 [M, tiles, KEPT], descending.
        columns: int32 [M, tiles, KEPT], the columns that have them; arbitrary for a bound of minus infinity.
        rest: float32 [M, tiles], the largest bound of a tile's other columns.
    """

    bounds: torch.Tensor
    columns: torch.Tensor
    rest: torch.Tensor


def tile_bounds(rows: SplitRows, head: BoundedHead, config: TritonConfig, pdl: bool) -> TileBounds:
    """`bounded_head.upper_bounds` by tiles of `config.block_n` columns, of which the largest are kept.

    Args:
        rows: of M <= 64 rows of states.
        config: a tiling with `swap`.
        pdl: as in `triton_gemm`.
    """
    narrow = head.narrow
    assert narrow is not None, "the head has lost its copy"
    assert config.swap, f"expected a tiling with swap; got {config}"
    M, (N, K) = len(rows.step), narrow.shape
    tiles = triton.cdiv(N, config.block_n)
    found = TileBounds(
        torch.empty((M, tiles, KEPT.value), dtype=torch.float32, device=narrow.device),
        torch.empty((M, tiles, KEPT.value), dtype=torch.int32, device=narrow.device),
        torch.empty((M, tiles), dtype=torch.float32, device=narrow.device),
    )
    weight = TensorDescriptor(narrow, [N, K], [K, 1], [config.block_n, config.block_k]) if config.tma else narrow
    _bound_kernel[(tiles,)](
        rows.halves, weight, head.scale, head.slack, rows.step, rows.norm, found.bounds, found.columns, found.rest, M, N, K,
        BLOCK_M=padded_rows(2 * M) // 2, BLOCK_N=config.block_n, BLOCK_K=config.block_k, TMA=config.tma, EVEN_K=K % config.block_k == 0,
        PDL=pdl, num_warps=config.num_warps, num_stages=config.stages, **launch_options(pdl),
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["M"])
def _bound_kernel(
    x_ptr, weight, scale_ptr, slack_ptr, step_ptr, norm_ptr, bounds_ptr, columns_ptr, rest_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the bounds of one tile of columns, for all rows."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    first = tile * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    half = tl.arange(0, 2 * BLOCK_M)
    acc = tl.zeros((BLOCK_N, 2 * BLOCK_M), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (half < 2 * M)[:, None] if EVEN_K else (half < 2 * M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + half[:, None] * K + k[None, :], mask=x_mask, other=0, eviction_policy="evict_last")
        if TMA:
            w = weight.load([first, start])
        elif EVEN_K:
            w = tl.load(weight + w_row[:, None] * K + k[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(weight + w_row[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0, eviction_policy="evict_first")
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)

    high, low = tl.split(acc.reshape(BLOCK_N, BLOCK_M, 2))
    m = tl.arange(0, BLOCK_M)
    inside = m < M
    step, norm = tl.load(step_ptr + m, mask=inside, other=0.0), tl.load(norm_ptr + m, mask=inside, other=0.0)
    scale, slack = tl.load(scale_ptr + w_row), tl.load(slack_ptr + w_row)
    bound = (HALVES * high.to(tl.float32) + low.to(tl.float32)) * (scale[:, None] * step[None, :]) + slack[:, None] * norm[None, :]
    bound = tl.where((n < N)[:, None], bound, float("-inf"))
    at = (m * tiles + tile) * KEPT
    for i in tl.static_range(KEPT):
        largest = tl.max(bound, 0)
        column = tl.min(tl.where(bound == largest[None, :], n[:, None], NO_COLUMN), 0)
        tl.store(bounds_ptr + at + i, largest, mask=inside)
        tl.store(columns_ptr + at + i, column, mask=inside)
        bound = tl.where(n[:, None] == column[None, :], float("-inf"), bound)
    tl.store(rest_ptr + m * tiles + tile, tl.max(bound, 0), mask=inside)
