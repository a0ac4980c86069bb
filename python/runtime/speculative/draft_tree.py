"""The tree of drafts (topk > 1): grown level by level, then cut to the D most likely nodes.

All functions run on the device at fixed shapes without host reads. B requests, K steps, D draft tokens.

Candidates are numbered: 0 is the last committed token, 1..topk the first guesses, then topk * topk of each later level,
children of beam node j at j * topk. So a parent's number is always smaller than its child's, and numbers grow with
depth.

Source: EAGLE-2, Li et al. 2024, arXiv:2406.16858, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.model_executor.draft_window import DraftWindow, TreeShape


@dataclass(frozen=True, slots=True)
class Beam:
    """A partly grown tree, after `level` passes of the draft.

    Attributes:
        tokens: int64 [B, topk], the inputs of the next draft pass, best first.
        scores: float32 [B, topk], their cumulative log-probabilities.
        ids: int64 [B, topk], their candidate numbers.
        parents: int64 [B, topk], the index of each token's parent in the previous pass, which selects its hidden state. 0 at level 0.
        mask: int64 [B, topk], for `ForwardBatch.tree_mask` of the next pass, whose `tree_tail` is (level + 1) * topk:
            bit i * topk + j is token j of pass i.
        all_tokens, all_parents, all_scores: [B, N], every candidate so far; parents by candidate number.
    """

    level: int
    tokens: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    parents: torch.Tensor
    mask: torch.Tensor
    all_tokens: torch.Tensor
    all_parents: torch.Tensor
    all_scores: torch.Tensor


def top_log_probs(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` most likely ids int64 [N, topk] and their log-probabilities float32 [N, topk], of logits [N, V]."""
    logits = logits.float()
    values, ids = logits.topk(topk, dim=-1)
    return ids, values - logits.logsumexp(-1, keepdim=True)


def start_tree(tokens: torch.Tensor, scores: torch.Tensor) -> Beam:
    """A tree of the first guesses: int64 [B, topk] and their log-probabilities float32 [B, topk], best first."""
    B, topk = tokens.shape
    root = torch.zeros_like(tokens)
    ids = (torch.arange(topk, device=tokens.device) + 1).expand(B, topk)
    scores = scores.float().clamp(max=0.0)
    return Beam(0, tokens, scores, ids, root, _bits(0, topk, tokens).expand(B, topk), tokens, root, scores)


def grow_tree(beam: Beam, child_tokens: torch.Tensor, child_scores: torch.Tensor) -> Beam:
    """Extend the tree by the results of one draft pass over `beam.tokens`.

    Args:
        child_tokens: int64 [B, topk, topk], the most likely continuations of each beam token, best first.
        child_scores: float32 [B, topk, topk], their log-probabilities given that token.

    Returns:
        the beam of the `topk` best of the new candidates; ties go to the better parent, then to the better child.
    """
    B, topk = beam.tokens.shape
    # A child never scores above its parent, so `cut_tree` keeps the parent of every node that it keeps.
    scores = (beam.scores[:, :, None] + child_scores.float().clamp(max=0.0)).flatten(1)
    tokens = child_tokens.flatten(1)
    parent_ids = beam.ids[:, :, None].expand(B, topk, topk).flatten(1)
    best, chosen = scores.sort(dim=1, descending=True, stable=True)
    best, chosen = best[:, :topk], chosen[:, :topk]
    parents = chosen // topk
    level = beam.level + 1
    return Beam(
        level=level,
        tokens=tokens.gather(1, chosen),
        scores=best,
        ids=chosen + (1 + topk + (level - 1) * topk * topk),
        parents=parents,
        mask=beam.mask.gather(1, parents) | _bits(level * topk, topk, tokens),
        all_tokens=torch.cat([beam.all_tokens, tokens], 1),
        all_parents=torch.cat([beam.all_parents, parent_ids], 1),
        all_scores=torch.cat([beam.all_scores, scores], 1),
    )


def cut_tree(beam: Beam, last_tokens: torch.Tensor, shape: TreeShape) -> DraftWindow:
    """Cut the tree to its D - 1 most likely candidates under the root `last_tokens` int64 [B].

    Ties go to the smaller candidate number, hence to the parent.
    """
    order = beam.all_scores.argsort(dim=1, descending=True, stable=True)[:, : shape.num_draft_tokens - 1]
    chosen = order.sort(dim=1).values
    root = torch.zeros_like(last_tokens)[:, None]
    ids = torch.cat([root, chosen + 1], 1)
    parent_ids = beam.all_parents.gather(1, chosen)
    parents = (ids[:, None, :] == parent_ids[:, :, None]).to(torch.uint8).argmax(2)
    parents = torch.cat([root - 1, parents], 1)
    tokens = torch.cat([last_tokens[:, None], beam.all_tokens.gather(1, chosen)], 1)
    return DraftWindow(tokens, parents, _depths(ids, shape.topk), ancestor_masks(parents, shape.num_steps))


def ancestor_masks(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Bit j of entry i: node j is node i or above it. parents int64 [B, D], -1 for roots -> int64 [B, D]."""
    own = _bits(0, parents.shape[1], parents)
    above = parents.clamp(min=0)
    has_parent = parents >= 0
    masks = own.expand_as(parents)
    for _ in range(max_depth):
        masks = own | torch.where(has_parent, masks.gather(1, above), 0)
    return masks


def _bits(first: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """1 << first, 1 << (first + 1), ...: int64 [count]; the 64th is the sign."""
    shifts = torch.arange(first, first + count, device=like.device)
    return torch.bitwise_left_shift(torch.ones_like(shifts), shifts)


def _depths(ids: torch.Tensor, topk: int) -> torch.Tensor:
    """The depth of each candidate number."""
    later = torch.div(ids - 1 - topk, topk * topk, rounding_mode="floor") + 2
    return torch.where(ids <= topk, (ids > 0).to(torch.int64), later)
