"""Attention over prompts with heads wider than FA3's: a head is read in two halves, and the query heads of a group share each key.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691.
"""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.attention.kernels.paged_keys import CausalQueries, PagedKeys
from runtime.layers.attention.kernels.split_decode import LN_2
from runtime.layers.attention.kernels.tile_slots import tile_slots

ROWS, TILE = 64, 32
"""Rows per program, which are queries times heads of a group, and keys per step."""


def wide_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, keys: PagedKeys, queries: CausalQueries, scale: float, window: int = -1
) -> torch.Tensor:
    """Causal attention of ragged queries over the paged cache. May be captured.

    Args:
        q: [T, H, D] contiguous, bfloat16 or float16; D is a power of two.
        k_cache, v_cache: [num_pages, page_size, G, D] contiguous; H / G is at most `ROWS`.
        keys: location of the keys, including those of the queries.
        scale: factor of the scores.
        window: number of keys before its own that a query sees; -1 for all.

    Returns:
        [T, H, D], the dtype of q.
    """
    (_, H, D), G = q.shape, k_cache.shape[2]
    out, group = torch.empty_like(q), H // G
    tokens = ROWS // group
    _prefill_kernel[(triton.cdiv(queries.most, tokens), G, len(keys.rows))](
        q, k_cache, v_cache, keys.pages, keys.rows, keys.seq_lens, queries.cu_seqlens, out, scale / LN_2, window, keys.pages.stride(0),
        GROUP=group, NUM_KV=G, HALF=D // 2, TOKENS=tokens, BLOCK_M=ROWS, TILE=TILE, PAGE=keys.page_size, WINDOW=window >= 0,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window", "pages_stride"], do_not_specialize_on_alignment=["rows_ptr", "lens_ptr", "indptr_ptr"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, rows_ptr, lens_ptr, indptr_ptr, out_ptr, scale, window, pages_stride,
    GROUP: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program processes some queries of one request, all query heads of one KV head, against all keys that they see."""
    first, g, b = tl.program_id(0) * TOKENS, tl.program_id(1), tl.program_id(2)
    start = tl.load(indptr_ptr + b)
    width = tl.load(indptr_ptr + b + 1) - start
    if first < width:
        length = tl.load(lens_ptr + b)
        pages = pages_ptr + tl.load(rows_ptr + b).to(tl.int64) * pages_stride
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, HALF)
        token = first + m // GROUP
        inside = (m < TOKENS * GROUP) & (token < width)
        row = ((start + token).to(tl.int64) * (NUM_KV * GROUP) + g * GROUP + m % GROUP) * (2 * HALF)
        at = row[:, None] + d[None, :]
        q_low = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
        q_high = tl.load(q_ptr + at + HALF, mask=inside[:, None], other=0.0)
        position = length - width + token
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        low = tl.zeros((BLOCK_M, HALF), dtype=tl.float32)
        high = tl.zeros((BLOCK_M, HALF), dtype=tl.float32)
        begin = 0
        if WINDOW:
            begin = tl.maximum(length - width + first - window, 0) // TILE
        end = tl.cdiv(tl.minimum(length - width + first + TOKENS, length), TILE)
        for tile in range(begin, end):
            n = tile * TILE + tl.arange(0, TILE)
            kv_at = (tile_slots(pages, tile, length, TILE, PAGE) * NUM_KV + g)[:, None] * (2 * HALF) + d[None, :]
            n_in = (n < length)[:, None]
            scores = tl.dot(q_low, tl.trans(tl.load(k_ptr + kv_at, mask=n_in, other=0.0)))
            scores = tl.dot(q_high, tl.trans(tl.load(k_ptr + kv_at + HALF, mask=n_in, other=0.0)), scores) * scale
            visible = n[None, :] <= tl.minimum(position, length - 1)[:, None]
            if WINDOW:
                visible = visible & (n[None, :] >= (position - window)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # a tile before the window of some rows
            weights, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
            total = total * shrink + tl.sum(weights, 1)
            weights = weights.to(q_low.dtype)
            low = tl.dot(weights, tl.load(v_ptr + kv_at, mask=n_in, other=0.0), low * shrink[:, None])
            high = tl.dot(weights, tl.load(v_ptr + kv_at + HALF, mask=n_in, other=0.0), high * shrink[:, None])
            top = higher
        total = tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + at, (low / total).to(out_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(out_ptr + at + HALF, (high / total).to(out_ptr.dtype.element_ty), mask=inside[:, None])
