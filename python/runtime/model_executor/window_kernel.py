"""`load_rows` and `fill_window`, the inputs of fixed-width passes, as one Triton kernel each."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels.pdl import launch_options, pdl_wait_first, starts_early
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.request_rows import RequestRows

ROWS = 128
"""Requests of one program of `_load`."""


@triton.jit(do_not_specialize=["size"])
def _load(
    rows, row_lens, row_tokens, indices, page_rows, kv_lens, last_tokens, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program: `BLOCK` requests."""
    pdl_wait_first(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < size
    row = tl.load(rows + request, mask=inside, other=0)
    tl.store(indices + request, row, mask=inside)
    tl.store(page_rows + request, row.to(tl.int32), mask=inside)
    tl.store(kv_lens + request, tl.load(row_lens + row, mask=inside, other=0), mask=inside)
    tl.store(last_tokens + request, tl.load(row_tokens + row, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["ahead"], do_not_specialize_on_alignment=["tokens", "depths"])
def _fill(
    rows, kv_lens, tokens, token_stride, depths, depth_stride, pages, page_stride, page_size,
    input_ids, positions, out_cache_loc, seq_lens, ahead, width, HAS_DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the window of one request."""
    pdl_wait_first(PDL)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    length = tl.load(kv_lens + request) + ahead
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


def load_rows_cuda(inputs: InputBuffers, rows: torch.Tensor, state: RequestRows) -> None:
    """See `load_rows`."""
    size, pdl = len(rows), starts_early(rows.device)
    _load[(triton.cdiv(size, ROWS),)](
        rows, state.kv_lens, state.last_tokens, inputs.rows(size), inputs.named("page_rows", size), inputs.kv_lens(size),
        inputs.last_tokens(size), size, BLOCK=ROWS, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def fill_window_cuda(
    batch: ForwardBatch, page_table: PageTable, kv_lens: torch.Tensor, tokens: torch.Tensor, depths: torch.Tensor | None, ahead: int
) -> None:
    """See `fill_window`. `tokens` and `depths` may be strided between requests.

    Attention reads positions, slots and lengths before its own PDL wait. A kernel between this one and attention must therefore wait before
    it triggers the next launch, as the embedding kernel does.
    """
    width, pdl = batch.tokens_per_req, starts_early(kv_lens.device)
    assert tokens.stride(-1) == 1 or width == 1
    _fill[(batch.batch_size,)](
        batch.req_pool_indices, kv_lens, tokens, tokens.stride(0), depths if depths is not None else tokens,
        depths.stride(0) if depths is not None else 0, page_table.pages, page_table.pages.stride(0), page_table.page_size,
        batch.input_ids, batch.positions, batch.out_cache_loc, batch.seq_lens, ahead, width,
        HAS_DEPTHS=depths is not None, BLOCK=triton.next_power_of_2(width), PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
