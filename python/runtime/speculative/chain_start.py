"""The start of a chain of drafts: each request's last token, first guess and hidden state."""

from __future__ import annotations

import torch

from runtime.speculative.draft_state import DraftState


def start_chain(rows: torch.Tensor, last_tokens: torch.Tensor, state: DraftState, tokens: torch.Tensor) -> torch.Tensor:
    """Write last tokens and first guesses to the first two columns of `tokens`; one kernel on a GPU. In the graph.

    Args:
        rows: int64 [B], request rows.
        last_tokens: int64 [R], by row.
        tokens: int64 [B, D], D at least 2.

    Returns:
        [B, hidden], a copy of the rows' hidden states.
    """
    if rows.is_cuda:
        from runtime.speculative.chain_start_kernel import start_chain_cuda

        return start_chain_cuda(rows, last_tokens, state.tokens, state.hidden, tokens)
    tokens[:, 0].copy_(last_tokens[rows])
    tokens[:, 1].copy_(state.tokens[rows, 0])
    return state.hidden[rows]
