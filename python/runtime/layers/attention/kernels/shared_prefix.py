"""Attention to a prefix that all requests share and to each request's own keys: the page table after the prefix, and the merge of both."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.attention.kernels.split_decode import LN_2

COLUMNS = 1024
"""Columns of the page table per program."""
HEADS = 4
"""Query heads per program of the merge."""


def split_pages(
    pages: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    shared_lens: torch.Tensor,
    page_size: int,
    own_pages: torch.Tensor,
    own_lens: torch.Tensor,
) -> None:
    """Fill `own_pages` and `own_lens`: the pages of each request after the shared prefix, and its keys there.

    Args:
        pages: int32 [R, max_pages], the page table.
        rows: int32 [B].
        seq_lens: int32 [B], keys of each request.
        shared_lens: int32 [B], all equal, a multiple of `page_size`. A request with fewer keys (padding) has none of its own.
        own_pages: int32 [B, max_pages]; columns past the pages of the table are 0.
        own_lens: int32 [B].
    """
    columns = pages.shape[1]
    _split_pages_kernel[(len(rows), triton.cdiv(columns, COLUMNS))](
        pages, rows, seq_lens, shared_lens, own_pages, own_lens, page_size, columns, pages.stride(0), BLOCK=COLUMNS, num_warps=4
    )


@triton.jit(do_not_specialize=["page_size", "columns", "stride"])
def _split_pages_kernel(
    pages_ptr, rows_ptr, lens_ptr, shared_ptr, own_pages_ptr, own_lens_ptr, page_size, columns, stride, BLOCK: tl.constexpr
):  # fmt: skip
    b, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shared = tl.load(shared_ptr + b)
    row = tl.load(rows_ptr + b).to(tl.int64)
    source = column + shared // page_size
    page = tl.load(pages_ptr + row * stride + source, mask=source < columns, other=0)
    tl.store(own_pages_ptr + b.to(tl.int64) * columns + column, page, mask=column < columns)
    if tl.program_id(1) == 0:
        tl.store(own_lens_ptr + b, tl.maximum(tl.load(lens_ptr + b) - shared, 0))


def merge_prefix(
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    own_lens: torch.Tensor,
    shared_lens: torch.Tensor,
    *,
    lse_in_bits: bool,
) -> torch.Tensor:
    """Merge the attention to each request's own keys with that to the shared prefix, in place of the former.

    Args:
        out, prefix_out: [B * W, H, D] contiguous, W queries per request; arbitrary where there are no keys.
        lse, prefix_lse: float32, their log-sum-exp, [B * W, H] views with any strides.
        own_lens, shared_lens: int32 [B], the number of keys of each part.
        lse_in_bits: whether `lse` is a base-2 logarithm.

    Returns:
        `out`. The merge is the one of split softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    T, H, D = out.shape
    _merge_kernel[(T, triton.cdiv(H, HEADS))](
        out, lse, prefix_out, prefix_lse, own_lens, shared_lens, T // len(own_lens), H, *lse.stride(), *prefix_lse.stride(),
        D=D, BLOCK_D=triton.next_power_of_2(D), HEADS=HEADS, LSE_SCALE=LN_2 if lse_in_bits else 1.0, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width", "num_heads", "lse_stride_t", "lse_stride_h", "prefix_stride_t", "prefix_stride_h"])
def _merge_kernel(
    out_ptr, lse_ptr, prefix_out_ptr, prefix_lse_ptr, own_lens_ptr, shared_lens_ptr, width, num_heads, lse_stride_t, lse_stride_h,
    prefix_stride_t, prefix_stride_h, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, LSE_SCALE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    has_own = (head < num_heads) & (tl.load(own_lens_ptr + t // width) > 0)
    has_prefix = (head < num_heads) & (tl.load(shared_lens_ptr + t // width) > 0)
    token = t.to(tl.int64)
    own = tl.load(lse_ptr + token * lse_stride_t + head * lse_stride_h, mask=has_own, other=float("-inf")) * LSE_SCALE
    prefix = tl.load(prefix_lse_ptr + token * prefix_stride_t + head * prefix_stride_h, mask=has_prefix, other=float("-inf"))
    top = tl.maximum(own, prefix)
    top = tl.where(top == float("-inf"), 0.0, top)
    own, prefix = tl.exp(own - top), tl.exp(prefix - top)
    total = own + prefix
    total = tl.where(total == 0.0, 1.0, total)
    at = (token * num_heads + head)[:, None] * D + d[None, :]
    inside = (head < num_heads)[:, None] & (d < D)[None, :]
    values = tl.load(out_ptr + at, mask=inside & has_own[:, None], other=0.0).to(tl.float32) * (own / total)[:, None]
    values += tl.load(prefix_out_ptr + at, mask=inside & has_prefix[:, None], other=0.0).to(tl.float32) * (prefix / total)[:, None]
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=inside)
