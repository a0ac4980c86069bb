"""The best of the tokens that approximate scores select, by exact scores, as Triton kernels."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.argmax_kernel import argmax_chunks
from runtime.layers.kernels.argmax_reduce import LEAST_KEY, NO_COLUMN, order_key
from runtime.layers.kernels.pdl import launch_options, pdl_sync

TILES = 32
"""Maximum tiles of a group."""
BEST = tl.constexpr(2)
"""Candidates of a group."""
SLICE = 4096
"""Columns of a row that are multiplied at once."""


def best_of_tiles(
    partial: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    count: int,
    out: torch.Tensor,
    pdl: bool,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each row the token with the largest `x @ weight.T` among up to `count` candidates, the lowest of equal ones: int64 [M] in `out`.

    Candidates are the tokens with the largest approximate scores, except that each tile has only one, and each group of up to 32 tiles two
    (twice the same if it has one tile). There are groups for `count` candidates, unless there are fewer tiles.

    Args:
        partial: int32 [2, M, tiles] contiguous: the key of each tile's largest approximate score and its column, by `tile_argmax`.
        stride: column i is token `i * stride % V`.
        x, weight: bfloat16 [M, K] and [V, K], contiguous.
        pdl: as in `triton_gemm`.
        logits: float32 [M, V] contiguous; receives the exact scores of the candidates, and nothing else.
    """
    (_, M, tiles), (V, K) = partial.shape, weight.shape
    groups = max(triton.cdiv(tiles, TILES), min(triton.cdiv(count, BEST.value), tiles))
    entries = groups * BEST.value
    count = min(count, entries)
    assert partial.is_contiguous(), "expected contiguous tiles"
    assert x.is_contiguous(), "expected contiguous rows"
    assert weight.is_contiguous(), "expected contiguous weights"
    assert logits is None or logits.is_contiguous(), "expected contiguous logits"
    found = torch.empty((2, M, entries), dtype=torch.int32, device=x.device)
    _search_kernel[(groups, M)](partial, found, tiles, TILES=TILES, PDL=pdl, num_warps=1, **launch_options(pdl))
    exact = torch.empty((2, M, count), dtype=torch.int32, device=x.device)
    _score_kernel[(count, M)](
        found, x, weight, exact, logits, V, stride, entries, K=K, ENTRIES=triton.next_power_of_2(entries),
        SLICE=min(triton.next_power_of_2(K), SLICE), PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return argmax_chunks(exact, out, pdl)


@triton.jit
def _search_kernel(partial_ptr, found_ptr, tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    """One program: the best columns of every `groups`-th tile of one row."""
    pdl_sync(PDL)
    group, row, groups, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    tile = tl.arange(0, TILES) * groups + group
    at, inside = partial_ptr + row * tiles + tile, tile < tiles
    key = tl.load(at, mask=inside, other=LEAST_KEY)
    column = tl.load(at + rows * tiles, mask=inside, other=NO_COLUMN)
    for i in tl.static_range(BEST):
        largest = tl.max(key, 0)
        first = tl.min(tl.where(key == largest, column, NO_COLUMN), 0)
        slot = found_ptr + (row * groups + group) * BEST + i
        tl.store(slot, largest)
        tl.store(slot + rows * groups * BEST, first)
        key = tl.where(column == first, LEAST_KEY, key)


@triton.jit
def _score_kernel(
    found_ptr, x_ptr, weight_ptr, exact_ptr, logits_ptr, V, stride, entries,
    K: tl.constexpr, ENTRIES: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the exact score of the candidate with one rank."""
    pdl_sync(PDL)
    rank, row, count, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    entry = tl.arange(0, ENTRIES)
    inside = entry < entries
    key = tl.load(found_ptr + row * entries + entry, mask=inside, other=LEAST_KEY)
    above = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (entry[None, :] < entry[:, None]))
    chosen = tl.sum(above.to(tl.int32), 1) == rank
    columns = tl.load(found_ptr + rows * entries + row * entries + entry, mask=inside, other=0)
    token = tl.sum(tl.where(chosen, columns, 0), 0).to(tl.int64) * stride % V
    total = tl.zeros((SLICE,), dtype=tl.float32)
    for start in range(0, K, SLICE):
        k = start + tl.arange(0, SLICE)
        w = tl.load(weight_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        total += w * tl.load(x_ptr + row.to(tl.int64) * K + k, mask=k < K, other=0.0).to(tl.float32)
    score, slot = tl.sum(total, 0), exact_ptr + row * count + rank
    tl.store(slot, order_key(score))
    tl.store(slot + rows * count, token.to(tl.int32))
    if logits_ptr is not None:
        tl.store(logits_ptr + row.to(tl.int64) * V + token, score)
