"""`start_chain` as one Triton kernel."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_wait_first, starts_early

COLUMNS = 1024
"""Values of a hidden state that one program copies."""


def start_chain_cuda(
    rows: torch.Tensor, last_tokens: torch.Tensor, guesses: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """See `start_chain`. `guesses` int64 [R, 1] and `states` [R, hidden] are by row, contiguous."""
    (B, D), hidden, pdl = tokens.shape, states.shape[1], starts_early(rows.device)
    assert tokens.is_contiguous(), "the window must be contiguous"
    assert guesses.shape[1] == 1, "a chain has one guess"
    assert D >= 2, "the window has at least one draft"
    out = torch.empty((B, hidden), dtype=states.dtype, device=states.device)
    _start_kernel[(B, triton.cdiv(hidden, COLUMNS))](
        rows, last_tokens, guesses, states, tokens, out, D, hidden, BLOCK=COLUMNS, PDL=pdl, **launch_options(pdl)
    )
    return out


@triton.jit(do_not_specialize=["D"])
def _start_kernel(
    rows_ptr, last_ptr, guess_ptr, state_ptr, tokens_ptr, out_ptr, D, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program: some columns of one request's state, the first program also its tokens."""
    pdl_wait_first(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    if tl.program_id(1) == 0:
        tl.store(tokens_ptr + request * D, tl.load(last_ptr + row))
        tl.store(tokens_ptr + request * D + 1, tl.load(guess_ptr + row))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    tl.store(out_ptr + request * hidden + column, tl.load(state_ptr + row * hidden + column, mask=inside), mask=inside)
