"""`fill_window` as one kernel: ten small launches take longer than a phase of a small model."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable


@triton.jit
def _fill(
    rows, kv_lens, tokens, token_stride, depths, depth_stride, pages, page_stride, page_size,
    input_ids, positions, out_cache_loc, seq_lens, width, HAS_DEPTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows + request)
    length = tl.load(kv_lens + request)
    j = tl.arange(0, BLOCK)
    inside = j < width
    at = length + j
    page = tl.load(pages + row * page_stride + at // page_size, mask=inside, other=0).to(tl.int64)
    place = length.to(tl.int64) + j
    if HAS_DEPTHS:
        place = length.to(tl.int64) + tl.load(depths + request * depth_stride + j, mask=inside, other=0)
    out = request * width + j
    tl.store(input_ids + out, tl.load(tokens + request * token_stride + j, mask=inside, other=0), mask=inside)
    tl.store(positions + out, place, mask=inside)
    tl.store(out_cache_loc + out, page * page_size + at % page_size, mask=inside)
    tl.store(seq_lens + request, length + width)


def fill_window_cuda(
    batch: ForwardBatch, page_table: PageTable, kv_lens: torch.Tensor, tokens: torch.Tensor, depths: torch.Tensor | None
) -> None:
    """See `fill_window`. `tokens` and `depths` may be strided between requests."""
    width = batch.tokens_per_req
    assert tokens.stride(-1) == 1 or width == 1
    _fill[(batch.batch_size,)](
        batch.req_pool_indices, kv_lens, tokens, tokens.stride(0), depths if depths is not None else tokens,
        depths.stride(0) if depths is not None else 0, page_table.pages, page_table.pages.stride(0), page_table.page_size,
        batch.input_ids, batch.positions, batch.out_cache_loc, batch.seq_lens, width,
        HAS_DEPTHS=depths is not None, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
