"""The tail of a tree pass: attention to the last keys under a bit mask, merged with attention to all earlier keys."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.config.attention_caps import MAX_TREE_BITS
from runtime.layers.attention.kernels.paged_keys import PagedKeys

LN_2 = 0.6931471805599453


def merge_tree_tail(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: PagedKeys,
    tail: int,
    mask: torch.Tensor,
    scale: float,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    lse_in_bits: bool,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the tail and merge with `prefix_out` in place.

    Args:
        q: [B * W, H, D], W queries per request, contiguous.
        k_cache, v_cache: [num_pages, page_size, G, D].
        keys: location of all keys.
        tail: number of keys at the end of each request that the masks cover.
        mask: int64 [B * W]; bit t: whether the query sees the t-th key of the tail.
        scale: factor of the scores.
        prefix_out: [B * W, H, D] contiguous, attention over the keys before the tail; arbitrary if there are none.
        prefix_lse: float32, its log-sum-exp, a [B * W, H] view with any strides.
        lse_in_bits: whether `prefix_lse` is a base-2 logarithm.
        sinks: [H], a score per head that is part of the softmax and has no value; `prefix_out` does not include it.
        kv_scales: as in `split_attention`.

    Returns:
        `prefix_out`, now over all visible keys. The merge is the one of split softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    assert 0 < tail <= MAX_TREE_BITS, f"a tree tail of {tail} keys; a mask has {MAX_TREE_BITS} bits"
    B, (T, H, D), G = keys.rows.shape[0], q.shape, k_cache.shape[2]
    width, group = T // B, H // G
    block_m = min(max(triton.next_power_of_2(width * group), 16), 64)
    _tail_kernel[(B, G, triton.cdiv(width * group, block_m))](
        q, k_cache, v_cache, kv_scales, sinks, keys.pages, keys.rows, keys.seq_lens, mask, prefix_out, prefix_lse,
        scale, width, tail, keys.page_size, keys.pages.stride(0), prefix_lse.stride(0), prefix_lse.stride(1), H,
        GROUP=group, NUM_KV=G, D=D, BLOCK_D=max(triton.next_power_of_2(D), 16), BLOCK_M=block_m,
        BLOCK_N=max(triton.next_power_of_2(tail), 16), LSE_SCALE=LN_2 if lse_in_bits else 1.0,
        SINKS=sinks is not None, SCALED=kv_scales is not None, num_warps=4,
    )  # fmt: skip
    return prefix_out


@triton.jit(
    do_not_specialize=["width", "tail", "page_size", "pages_stride", "lse_stride_t", "lse_stride_h"],
    do_not_specialize_on_alignment=["scales_ptr", "sinks_ptr"],
)
def _tail_kernel(
    q_ptr, k_ptr, v_ptr, scales_ptr, sinks_ptr, pages_ptr, rows_ptr, lens_ptr, mask_ptr, out_ptr, lse_ptr,
    scale, width, tail, page_size, pages_stride, lse_stride_t, lse_stride_h, num_heads,
    GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LSE_SCALE: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program (b, g, block) processes up to 64 queries of request b against the tail of KV head g."""
    b = tl.program_id(0)
    g = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    m_in, n_in, d_in = m < width * GROUP, n < tail, d < D

    token = (b * width + m // GROUP).to(tl.int64)
    head = g * GROUP + m % GROUP
    q_at = (token * num_heads + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_at, mask=m_in[:, None] & d_in[None, :], other=0.0)
    bits = tl.load(mask_ptr + token, mask=m_in, other=0)

    start = tl.load(lens_ptr + b) - tail
    position = start + n
    key_in = n_in & (position >= 0)
    row = tl.load(rows_ptr + b).to(tl.int64)
    page = tl.load(pages_ptr + row * pages_stride + position // page_size, mask=key_in, other=0).to(tl.int64)
    slot = page * page_size + position % page_size
    kv_at = (slot * NUM_KV + g)[:, None] * D + d[None, :]
    kv_in = key_in[:, None] & d_in[None, :]
    k = tl.load(k_ptr + kv_at, mask=kv_in, other=0.0)
    v = tl.load(v_ptr + kv_at, mask=kv_in, other=0.0)
    if SCALED:
        k = (k.to(tl.float32) * tl.load(scales_ptr)).to(q.dtype)
        v = (v.to(tl.float32) * tl.load(scales_ptr + 1)).to(q.dtype)

    scores = tl.dot(q, tl.trans(k)) * scale
    visible = (((bits[:, None] >> n[None, :].to(tl.int64)) & 1) == 1) & key_in[None, :]
    scores = tl.where(visible, scores, float("-inf"))

    # The prefix counts as one more key whose score is its log-sum-exp. Without a prefix its output may even be NaN.
    has_prefix = m_in & (start > 0)
    lse = tl.load(lse_ptr + token * lse_stride_t + head * lse_stride_h, mask=has_prefix, other=float("-inf")) * LSE_SCALE
    before = tl.load(out_ptr + q_at, mask=has_prefix[:, None] & d_in[None, :], other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(scores, 1), lse)
    sink = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)  # keeps a row without visible keys finite
    weights = tl.exp(scores - top[:, None])
    prefix_weight = tl.exp(lse - top)
    total = tl.sum(weights, 1) + prefix_weight
    if SINKS:
        total += tl.exp(sink - top)
    out = tl.dot(weights.to(v.dtype), v) + before * prefix_weight[:, None]
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=m_in[:, None] & d_in[None, :])
