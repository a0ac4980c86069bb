"""Draft state by request row: the hidden state that the next draft pass reads, and the first guesses.

Draft-extend writes it (after every verify pass and every prompt chunk); draft-decode of the next iteration starts from it. It is indexed by
request row, because the batch may change in between. Row 0 is padding.
"""

from __future__ import annotations

import torch

from runtime.layers.kernels.argmax import argmax
from runtime.layers.random_streams import RandomStream
from runtime.layers.sampling_tables import TEMPERATURE, SamplingTables
from runtime.models.draft_head import DraftModel
from runtime.speculative.draft_mask import DraftMask
from runtime.speculative.draft_tree import top_log_probs


class DraftState:
    """Owner of the draft state.

    Attributes:
        hidden: [R, hidden] in the draft's dtype: the draft's own state at the last committed position.
        guesses: int64 [R, topk]: drafts for the position after the last token, as target ids.
        scores: float32 [R, topk]: their log-probabilities (trees).
        probs: float32 [R, Vd]: the distribution that a sampled first guess was drawn from (chains).
    """

    def __init__(self, rows: int, topk: int, hidden: int, draft_vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.topk = topk
        self.hidden = torch.zeros((rows, hidden), dtype=dtype, device=device)
        self.guesses = torch.zeros((rows, topk), dtype=torch.int64, device=device)
        self.scores = torch.zeros((rows, topk), dtype=torch.float32, device=device)
        self.probs = torch.zeros((rows, draft_vocab if topk == 1 else 0), dtype=torch.float32, device=device)

    def reset(self) -> None:
        """Set everything to zero."""
        for tensor in (self.hidden, self.guesses, self.scores, self.probs):
            tensor.zero_()


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

        return start_chain_cuda(rows, last_tokens, state.guesses, state.hidden, tokens)
    tokens[:, 0].copy_(last_tokens[rows])
    tokens[:, 1].copy_(state.guesses[rows, 0])
    return state.hidden[rows]


def guess(
    draft: DraftModel,
    hidden: torch.Tensor,
    tables: SamplingTables,
    rows: torch.Tensor,
    positions: torch.Tensor | None,
    mask: DraftMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A chain's next draft. Inside the graph, unless there is a mask.

    Args:
        hidden: [B, hidden], the draft's own hidden states.
        rows: int64 [B], request rows.
        positions: int64 [B], the positions of the guesses, by which random numbers are keyed. Guesses are then drawn from the draft's
            distribution at each request's temperature; greedy requests still take the most likely token. None: all requests do.
        mask: the tokens that grammars allow at this position.

    Returns:
        int64 [B] ids of the draft's vocabulary, and float32 [B, Vd] the distributions that they were drawn from; None without `positions`.
    """
    if positions is None and mask is None:
        return draft.greedy(hidden), None
    logits = draft.logits(hidden)
    if mask is not None:
        logits = mask.logits(logits)
    if positions is None:
        return argmax(logits), None
    temperature = tables.floats[rows, TEMPERATURE]
    greedy = temperature == 0.0
    probs = torch.softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    drawn = tables.ops.draw(probs, tables.ops.uniforms(tables.seeds[rows], positions, RandomStream.DRAFT))
    return torch.where(greedy, argmax(logits), drawn), probs


def store_guesses(
    state: DraftState, draft: DraftModel, hidden: torch.Tensor, tables: SamplingTables, rows: torch.Tensor, positions: torch.Tensor | None
) -> None:
    """Store hidden states and guesses after draft-extend. hidden [B, hidden], rows int64 [B], positions as for `guess`. In the graph."""
    if state.topk == 1:
        ids, probs = guess(draft, hidden, tables, rows, positions)
        ids = ids[:, None]
        if probs is not None:
            state.probs[rows] = probs
    else:
        ids, scores = top_log_probs(draft.logits(hidden), state.topk)
        state.scores[rows] = scores
    state.guesses[rows] = draft.map_to_target(ids)
