"""The stored inputs of the draft as Triton kernels: storing one position, filling a window, and gathering its states."""

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

COLUMNS = 1024
"""Values of one position's states that one program copies."""


@triton.jit(do_not_specialize=["token_stride"], do_not_specialize_on_alignment=["rows", "positions", "tokens"])
def _store(
    rows, positions, tokens, token_stride, states, stored_tokens, stored_states, width,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some columns of one request's states, the first program also its token."""
    pdl_wait_first(PDL)
    request = tl.program_id(0).to(tl.int64)
    at = tl.load(rows + request) * WIDTH + tl.load(positions + request) % WIDTH
    if tl.program_id(1) == 0:
        tl.store(stored_tokens + at, tl.load(tokens + request * token_stride))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(states + request * width + column, mask=inside)
    tl.store(stored_states + at * width + column, values.to(stored_states.dtype.element_ty), mask=inside)


@triton.jit
def _fill(
    rows, lens, stored_tokens, row_lens, row_tokens, pages, page_stride, page_size, indices, page_rows, kv_lens, last_tokens,
    accept_lens, input_ids, positions, out_cache_loc, seq_lens, PAD_SLOT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the window of one request."""
    pdl_wait_first(PDL)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    count = tl.load(lens + request)
    start = tl.maximum(tl.load(row_lens + row) - count, 0)  # padding has no KV
    tl.store(indices + request, row)
    tl.store(page_rows + request, row.to(tl.int32))
    tl.store(kv_lens + request, start)
    tl.store(last_tokens + request, tl.load(row_tokens + row))
    tl.store(accept_lens + request, count)
    tl.store(seq_lens + request, start + WIDTH)
    j = tl.arange(0, WIDTH)
    at, out = start + j, request * WIDTH + j
    page = tl.load(pages + row * page_stride + at // page_size).to(tl.int64)
    tl.store(input_ids + out, tl.load(stored_tokens + row * WIDTH + at % WIDTH))
    tl.store(positions + out, at.to(tl.int64))
    tl.store(out_cache_loc + out, tl.where(j < count, page * page_size + at % page_size, PAD_SLOT))


@triton.jit
def _gather(rows, kv_lens, stored_states, out, width, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: some columns of the states at one position of a window."""
    pdl_wait_first(PDL)
    token = tl.program_id(0).to(tl.int64)
    request = token // WIDTH
    at = tl.load(rows + request) * WIDTH + (tl.load(kv_lens + request) + token % WIDTH) % WIDTH
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    tl.store(out + token * width + column, tl.load(stored_states + at * width + column, mask=inside), mask=inside)


def store_position_cuda(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    states: torch.Tensor,
    stored_tokens: torch.Tensor,
    stored_states: torch.Tensor,
) -> None:
    """See `StoredInputs.add`. `stored_tokens` int64 [R, WIDTH], `stored_states` [R, WIDTH, width].

    `tokens` may be strided. Rows that occur several times, which only padding may, get any of their values.
    """
    (_, positions_per_row, width), pdl = stored_states.shape, starts_early(rows.device)
    _store[(len(rows), triton.cdiv(width, COLUMNS))](
        rows, positions, tokens, tokens.stride(0), states.contiguous(), stored_tokens, stored_states, width,
        WIDTH=positions_per_row, BLOCK=COLUMNS, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def fill_window_cuda(
    batch: ForwardBatch,
    inputs: InputBuffers,
    rows: torch.Tensor,
    lens: torch.Tensor,
    stored_tokens: torch.Tensor,
    state: RequestRows,
    page_table: PageTable,
    pad_slot: int,
) -> None:
    """See `StoredInputs.fill`. `stored_tokens` int64 [R, WIDTH].

    Attention reads positions, slots and lengths before its own PDL wait. A kernel between this one and attention must therefore wait before
    it triggers the next launch, as `gather_states_cuda` does.
    """
    size, pdl = batch.batch_size, starts_early(rows.device)
    _fill[(size,)](
        rows, lens, stored_tokens, state.kv_lens, state.last_tokens, page_table.pages, page_table.pages.stride(0), page_table.page_size,
        inputs.rows(size), inputs.named("page_rows", size), inputs.kv_lens(size), inputs.last_tokens(size),
        inputs.named("accept_lens", size), batch.input_ids, batch.positions, batch.out_cache_loc, batch.seq_lens,
        PAD_SLOT=pad_slot, WIDTH=batch.tokens_per_req, PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


def gather_states_cuda(rows: torch.Tensor, kv_lens: torch.Tensor, stored_states: torch.Tensor) -> torch.Tensor:
    """See `StoredInputs.states`. rows int64 [B], kv_lens int32 [B], stored_states [R, WIDTH, width]."""
    (_, positions, width), pdl = stored_states.shape, starts_early(rows.device)
    out = torch.empty((len(rows) * positions, width), dtype=stored_states.dtype, device=rows.device)
    _gather[(len(out), triton.cdiv(width, COLUMNS))](
        rows, kv_lens, stored_states, out, width, WIDTH=positions, BLOCK=COLUMNS, PDL=pdl, **launch_options(pdl)
    )
    return out
