"""Acceptance rules: which drafts the target commits, greedy and sampled, for chains and trees.

All functions run on the device without host reads, at fixed shapes, so that they can be captured. B requests, D draft
tokens (column or node 0 is the last committed token), K drafts (chain: D = K + 1), V target vocabulary, Vd draft
vocabulary. Padding rows may contain anything, including NaN and -1: their results are meaningless, but every index is
valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.layers.sampler import draw as torch_draw

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The type of `sampler.draw`."""
BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1. Uniform numbers are clamped to it, so that an inverse CDF stays in range."""


@dataclass(frozen=True, slots=True)
class AcceptThresholds:
    """Thresholds below 1 accept more drafts than the lossless rule does; 1.0 and 1.0 are lossless.

    Attributes:
        single: a draft whose target probability is at least this is always accepted.
        acc: acceptance probabilities are divided by this.

    Source: SGLang's `--speculative-accept-threshold-single` and `-acc`.
    """

    single: float = 1.0
    acc: float = 1.0

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's distribution."""
        return self.single >= 1.0 and self.acc >= 1.0


LOSSLESS = AcceptThresholds()


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distribution that the draft sampled from.

    Attributes:
        probs: float [B, K, Vd], after temperature.
        to_target: int64 [Vd], the target's id of each draft id; None when the vocabularies are one.
        to_draft: int64 [V], the inverse, -1 for tokens that the draft cannot produce; None as above.
    """

    probs: torch.Tensor
    to_target: torch.Tensor | None = None
    to_draft: torch.Tensor | None = None


def accept_chain_greedy(draft_BD: torch.Tensor, target_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts that equal the target's own choices.

    Args:
        draft_BD: int64 [B, D]. Column 0 is the last committed token, the rest are drafts.
        target_BD: int64 [B, D]. The target's argmax after each column of `draft_BD`.

    Returns:
        accept lengths int32 [B] in 1..D, the accepted drafts and the bonus token; and the committed tokens int64 [B, D], which are
        `target_BD`; columns past the accept length are padding.

    Source: Leviathan et al. 2023, arXiv:2211.17192, the greedy case.
    """
    return _prefix_lens(draft_BD[:, 1:] == target_BD[:, :-1]), target_BD


def accept_chain_sampled(
    draft_BD: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    draft: DraftProbs | None = None,
    thresholds: AcceptThresholds = LOSSLESS,
    draw: Draw = torch_draw,
    capped: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts with min(1, p/q); at the first rejection draw from (p - q)+, and after none from p.

    Args:
        draft_BD: int64 [B, D]. Column 0 is the last committed token, the rest are drafts, as target ids.
        target_probs: float [B, D, V]. p after each column, after temperature, top-k, top-p and min-p; one-hot for
            greedy rows.
        accept_uniforms: float [B, K], in [0, 1).
        final_uniforms: float [B] for the last token, or [B, D] with one for each of its possible positions.
        draft: the distributions that the drafts were drawn from; None for deterministic drafts, whose q is one-hot.
        thresholds: see `AcceptThresholds`.
        draw: how the last token is drawn.
        capped: whether `draft_BD` has entries of -1, which mean no draft: the token there is drawn from p.

    Returns:
        accept lengths int32 [B] in 1..D, and the committed tokens int64 [B, D]; columns past the accept length are
        padding. A committed token never has p = 0.

    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1.
    """
    vocab = target_probs.shape[2]
    tokens_BK = draft_BD[:, 1:].clamp(0, vocab - 1)
    p_BK = target_probs[:, :-1].gather(2, tokens_BK[:, :, None]).squeeze(2)
    q_BK = torch.ones_like(p_BK) if draft is None else _drafted_probs(draft, tokens_BK)
    accepted = (accept_uniforms.clamp(0.0, BELOW_ONE) * q_BK * thresholds.acc <= p_BK) & (p_BK > 0)
    if not thresholds.lossless:
        accepted |= p_BK >= thresholds.single
    if capped:
        accepted &= draft_BD[:, 1:] >= 0
    accept_lens = _prefix_lens(accepted)
    last_B = accept_lens.to(torch.int64) - 1
    weights = _residual(target_probs, tokens_BK, last_B, draft)
    if capped:
        undrafted = draft_BD.gather(1, (last_B + 1).clamp(max=tokens_BK.shape[1])[:, None]) < 0
        weights = torch.where(undrafted, _row(target_probs, last_B), weights)
    if final_uniforms.dim() == 2:
        final_uniforms = final_uniforms.gather(1, last_B[:, None]).squeeze(1)
    return accept_lens, _drafts_then(tokens_BK, last_B, draw(weights, final_uniforms.clamp(0.0, BELOW_ONE)))


def tree_targets_sampled(
    tokens_BD: torch.Tensor,
    parents_BD: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms_BD: torch.Tensor,
    accept_uniforms_BD: torch.Tensor | None,
    thresholds: AcceptThresholds,
    draw: Draw = torch_draw,
) -> torch.Tensor:
    """Draw the target's token after every node of a tree: int64 [B, D], for `accept_tree`.

    The lossless rule draws x from p and goes to the child with token x, if there is one. With thresholds below 1,
    SGLang's rule: children are tried in order, and accepted if a uniform number is at most their summed p / acc or if p >= single;
    otherwise the token is drawn from p without the children.

    Args:
        tokens_BD, parents_BD: the tree, as in `accept_tree`.
        target_probs: float [B, D, V], p after each node.
        uniforms_BD: float [B, D], in [0, 1). Nodes of one depth may share theirs: only one of them is on the path.
        accept_uniforms_BD: float [B, D], in [0, 1), for acceptance; needed only for thresholds below 1.
        draw: how tokens are drawn.
    """
    uniforms_BD = uniforms_BD.clamp(0.0, BELOW_ONE)
    if thresholds.lossless:
        # Node by node: the running sums of a whole window would be D times as large.
        return torch.stack([draw(target_probs[:, n], uniforms_BD[:, n]) for n in range(tokens_BD.shape[1])], 1)
    assert accept_uniforms_BD is not None, "thresholds below 1 need uniform numbers for acceptance"
    safe_BD = tokens_BD.clamp(0, target_probs.shape[2] - 1)
    rows = torch.arange(len(tokens_BD), device=tokens_BD.device)[:, None]
    p_child = target_probs[rows, parents_BD.clamp(min=0), safe_BD]
    drawn: list[torch.Tensor] = []
    for node in range(tokens_BD.shape[1]):
        mine = parents_BD == node
        p_mine = torch.where(mine, p_child, 0.0)
        coin = accept_uniforms_BD[:, node, None].clamp(0.0, BELOW_ONE)
        accepted = mine & (p_child > 0) & ((coin * thresholds.acc <= p_mine.cumsum(1)) | (p_mine >= thresholds.single))
        first = accepted.to(torch.uint8).argmax(1, keepdim=True)
        p = target_probs[:, node]
        kept = torch.ones_like(p).scatter_reduce(1, safe_BD, (~mine).to(p.dtype), "amin") * p
        other = draw(_or_else(kept, p), uniforms_BD[:, node])
        drawn.append(torch.where(accepted.any(1), safe_BD.gather(1, first).squeeze(1), other))
    return torch.stack(drawn, 1)


def accept_tree(
    tokens_BD: torch.Tensor, parents_BD: torch.Tensor, target_BD: torch.Tensor, max_path: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's tokens down a tree of drafts.

    Args:
        tokens_BD: int64 [B, D]. Node 0 is the last committed token.
        parents_BD: int64 [B, D]. The node above each; -1 for node 0. Parents come before children.
        target_BD: int64 [B, D]. The target's token after each node: its argmax, or a draw from p
            (`tree_targets_sampled`).
        max_path: nodes of the longest path, root included: K + 1.

    Returns:
        path: int64 [B, max_path], the nodes walked, root first; past the accept length the last one repeats.
        accept_lens: int32 [B], in 1..max_path: nodes of the path, which is also the number of committed tokens.
        out_tokens: int64 [B, max_path]: the committed tokens in order, the last repeated.
    """
    current = torch.zeros_like(tokens_BD[:, 0])
    alive = torch.ones_like(current, dtype=torch.bool)
    path, lengths = [current], torch.ones_like(current)
    for _ in range(max_path - 1):
        wanted = target_BD.gather(1, current[:, None])
        children = (parents_BD == current[:, None]) & (tokens_BD == wanted)
        children[:, 0] = False
        alive = alive & children.any(1)
        current = torch.where(alive, children.to(torch.uint8).argmax(1), current)
        lengths = lengths + alive
        path.append(current)
    path_BP = torch.stack(path, 1)
    return path_BP, lengths.to(torch.int32), target_BD.gather(1, path_BP)


def compaction(window_slots_BD: torch.Tensor, path_BP: torch.Tensor, accept_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments of `KVPool.move` that move an accepted path to the front of its verify window.

    Args:
        window_slots_BD: int64 [B, D]. The KV slot of each node in the verify pass. The page table cannot be used, because its row may
            belong to another request by now.
        path_BP, accept_lens: from `accept_tree`.

    Returns:
        source, target: int64 [B * min(P, D)] each; past the accept length both are slot 0, the padding slot.
    """
    length = min(path_BP.shape[1], window_slots_BD.shape[1])  # no path is longer than its window
    path_BP = path_BP[:, :length]
    live = torch.arange(length, device=path_BP.device)[None] < accept_lens[:, None]
    source = torch.where(live, window_slots_BD.gather(1, path_BP), 0)
    target = torch.where(live, window_slots_BD[:, :length], 0)
    return source.flatten(), target.flatten()


def accept_chain_synthetic(
    draft_BD: torch.Tensor,
    target_BD: torch.Tensor,
    probabilities_K: torch.Tensor,
    uniforms_BK: torch.Tensor,
    vocab_size: int,
    capped: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept draft i with probability `probabilities_K[i]` if all before it were accepted, regardless of the tokens: for benchmarks with
    dummy weights. With `capped`, drafts of -1 are not accepted.

    Returns:
        accept lengths int32 [B], and the committed tokens int64 [B, D]: the drafts, clamped to the vocabulary, then the
        target's token.
    """
    hits_BK = uniforms_BK < probabilities_K[None]
    accept_lens = _prefix_lens(hits_BK & (draft_BD[:, 1:] >= 0) if capped else hits_BK)
    last_B = accept_lens.to(torch.int64) - 1
    bonus = target_BD.gather(1, last_B[:, None]).squeeze(1)
    return accept_lens, _drafts_then(draft_BD[:, 1:].clamp(0, vocab_size - 1), last_B, bonus)


def _prefix_lens(hits_BK: torch.Tensor) -> torch.Tensor:
    """One more than the number of leading hits of each row, int32 [B]."""
    return (hits_BK.to(torch.int32).cumprod(dim=1).sum(dim=1) + 1).to(torch.int32)


def _drafts_then(tokens_BK: torch.Tensor, last_B: torch.Tensor, final_B: torch.Tensor) -> torch.Tensor:
    """The drafts int64 [B, K + 1] with `final_B` in column `last_B`."""
    padded = torch.cat([tokens_BK, final_B[:, None]], 1)
    return padded.scatter(1, last_B[:, None], final_B[:, None])


def _drafted_probs(draft: DraftProbs, tokens_BK: torch.Tensor) -> torch.Tensor:
    """q of each draft, [B, K]; 0 for a token that the draft cannot produce."""
    if draft.to_draft is None:
        return draft.probs.gather(2, tokens_BK[:, :, None]).squeeze(2)
    ids = draft.to_draft[tokens_BK]
    q = draft.probs.gather(2, ids.clamp(min=0)[:, :, None]).squeeze(2)
    return torch.where(ids >= 0, q, 0.0)


def _residual(target_probs: torch.Tensor, tokens_BK: torch.Tensor, last_B: torch.Tensor, draft: DraftProbs | None) -> torch.Tensor:
    """Weights [B, V] of the last token: (p - q)+ if a draft was rejected; p if none was, or if (p - q)+ is all zeros."""
    rejected = last_B < tokens_BK.shape[1]
    p = _row(target_probs, last_B)
    index = last_B.clamp(max=tokens_BK.shape[1] - 1)
    if draft is None:
        token = tokens_BK.gather(1, index[:, None])
        left = p.scatter(1, token, 0.0)
    elif draft.to_target is None:
        left = (p - _row(draft.probs, index)).clamp(min=0.0)
    else:
        left = p.index_add(1, draft.to_target, _row(draft.probs, index).to(p.dtype), alpha=-1).clamp(min=0.0)
    return torch.where(rejected[:, None], _or_else(left, p), p)


def _or_else(weights: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """`weights` by row, or `fallback` where they are all zeros: p and q are then equal, so p itself is correct."""
    return torch.where((weights > 0).any(1, keepdim=True), weights, fallback)


def _row(probs: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """`probs[b, index_B[b]]` of [B, N, V], as [B, V]."""
    return probs[torch.arange(len(index_B), device=index_B.device), index_B]
