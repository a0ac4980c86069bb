"""One Triton kernel that joins a draft head's inputs, embedding and hidden state, and applies both norms."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.draft_input import DraftInput, StreamStart
from runtime.layers.kernels.pdl import launch_options, pdl_wait_first
from runtime.layers.kernels.rms_norm import WIDE

NO_STREAM = tl.constexpr(int(StreamStart.PROJECTION))
NORMED_STREAM = tl.constexpr(int(StreamStart.NORMED_STATE))


def join_rows(
    ids: torch.Tensor, table: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, layout: DraftInput, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join embeddings and hidden states.

    Args:
        ids, positions: int64 [T], contiguous, of any alignment; ids in 0..V-1.
        table: [V, hidden] contiguous, 16 bits.
        states: [T, hidden], any float dtype.
        pdl: as in `embed_rows`.

    Returns:
        [T, 2 * hidden] in the dtype of `table`, and the stream float32 [T, hidden], or None by `layout.stream`.
    """
    states, (T, hidden) = states.contiguous(), states.shape
    assert table.shape[1] == hidden, f"expected embeddings as wide as the states, {hidden}; got {table.shape[1]}"
    rows = torch.empty((T, 2 * hidden), dtype=table.dtype, device=table.device)
    starts = layout.stream is not StreamStart.PROJECTION
    stream = torch.empty((T, hidden), dtype=torch.float32, device=table.device) if starts else None
    token_norm, state_norm = layout.norms or (None, None)
    _join_kernel[(T, 2)](
        ids, table, states, positions, None if token_norm is None else token_norm.weight, None if state_norm is None else state_norm.weight,
        rows, stream, hidden, 0.0 if token_norm is None else token_norm.eps, 0.0 if state_norm is None else state_norm.eps,
        BLOCK=triton.next_power_of_2(hidden), NORM=layout.norms is not None, STATE_FIRST=layout.state_first, BLANK=layout.blank_start,
        STREAM=int(layout.stream), PDL=pdl, num_warps=8 if hidden >= WIDE else 4, **launch_options(pdl),
    )  # fmt: skip
    return rows, stream


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "position_ptr"])
def _join_kernel(
    ids_ptr, table_ptr, state_ptr, position_ptr, token_gain_ptr, state_gain_ptr, rows_ptr, stream_ptr, hidden, token_eps, state_eps,
    BLOCK: tl.constexpr, NORM: tl.constexpr, STATE_FIRST: tl.constexpr, BLANK: tl.constexpr, STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program processes the embedding or the hidden state of one token."""
    t, is_state = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    gain = tl.zeros((BLOCK,), dtype=tl.float32)
    if NORM:
        if is_state:
            gain = tl.load(state_gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
        else:
            gain = tl.load(token_gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait_first(PDL)
    if is_state:
        x = tl.load(state_ptr + t * hidden + column, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(table_ptr + tl.load(ids_ptr + t) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        if BLANK:
            x = tl.where(tl.load(position_ptr + t) == 0, 0.0, x)
    y = x
    if NORM:
        y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden + tl.where(is_state, state_eps, token_eps))) * gain
    rounded = y.to(rows_ptr.dtype.element_ty)
    half = tl.where(is_state != STATE_FIRST, 1, 0)
    tl.store(rows_ptr + (2 * t + half) * hidden + column, rounded, mask=inside)
    if STREAM != NO_STREAM:  # noqa: SIM102 - the outer condition is a constexpr, the inner is not
        if is_state:
            begin = rounded.to(tl.float32) if STREAM == NORMED_STREAM else x
            tl.store(stream_ptr + t * hidden + column, begin, mask=inside)
