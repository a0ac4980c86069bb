"""The LM head: logits over a vocabulary that is sharded over ranks, and the most likely token over all ranks."""

from __future__ import annotations

import torch

from runtime.distributed.agreement import Agreement
from runtime.layers.bounded_head import HeadWithCopy
from runtime.layers.linear import Linear
from runtime.layers.ops import BlockOps


def all_logits(ops: BlockOps, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
    """`head(x)` over the whole vocabulary in float32 [N, V], written to `out` if given."""
    if not head.is_sharded:
        return ops.logits(x, head, out)
    logits = head.gather(ops.logits(x, head))
    return logits if out is None else out.copy_(logits)


def greedy(
    ops: BlockOps,
    x: torch.Tensor,
    head: Linear,
    tokens: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    agreement: Agreement | None = None,
) -> torch.Tensor:
    """The most likely token of each row, int64 [N], the smallest id of equal ones; written to `tokens` if given.

    Args:
        logits: float32 [N, own]; receives this rank's logits if given.
        agreement: the hash of committed tokens, compared with those of other ranks in the same exchange.
    """
    if not head.is_sharded:
        return ops.greedy(x, head, tokens, logits)
    logits = _own_logits(x, head) if logits is None else logits
    return _best_of_ranks(logits, ops.greedy(x, head, None, logits), head, tokens, agreement)


def greedy_by_copy(
    ops: BlockOps, x: torch.Tensor, head: HeadWithCopy, tokens: torch.Tensor | None = None, agreement: Agreement | None = None
) -> torch.Tensor:
    """`greedy` by a head's copy in 8 bits. With candidates, it is the best of those of all ranks, nearly always the most likely token."""
    if not head.own.is_sharded:
        return ops.greedy_by_copy(x, head, tokens)
    logits = _own_logits(x, head.own)
    return _best_of_ranks(logits, ops.greedy_by_copy(x, head, None, logits), head.own, tokens, agreement)


def _own_logits(x: torch.Tensor, head: Linear) -> torch.Tensor:
    """float32 [N, own], for this rank's logits."""
    return torch.empty((len(x), head.out_features), dtype=torch.float32, device=x.device)


def _best_of_ranks(
    logits: torch.Tensor, ids: torch.Tensor, head: Linear, tokens: torch.Tensor | None, agreement: Agreement | None
) -> torch.Tensor:
    """The token of the rank whose `logits` [N, own] have the largest entry at its `ids` [N]."""
    fused = head.group.fused
    if fused is not None:
        return fused.largest(logits, ids, head.own_rows.start, tokens, None if agreement is None else agreement.hashed)
    chosen = largest_of_ranks(logits.gather(1, ids[:, None])[:, 0], ids + head.own_rows.start, head, agreement)
    return chosen if tokens is None else tokens.copy_(chosen)


def largest_of_ranks(values: torch.Tensor, ids: torch.Tensor, head: Linear, agreement: Agreement | None) -> torch.Tensor:
    """The id of the largest value over all ranks, int64 [N]; of equal values that of the lowest rank, whose ids are smaller.

    One all-reduce exchanges the pairs: each rank fills its own rows of an array of zeros. Ids are exact in float32 up to 2^24.

    Args:
        values, ids: float32 and int64 [N], this rank's most likely tokens.
    """
    group, count = head.group, len(values)
    pairs = torch.zeros((group.size, count + 1, 2), dtype=torch.float32, device=values.device)
    own = pairs[group.rank]
    own[:count, 0], own[:count, 1] = values, ids
    if agreement is not None:
        own[count] = agreement.words()
    pairs = group.all_reduce(pairs)
    if agreement is not None:
        agreement.compare(pairs[:, count])
    best, chosen = pairs[0, :count].unbind(1)
    for rank in range(1, group.size):
        value, token = pairs[rank, :count].unbind(1)
        larger = (value > best) | (value.isnan() & ~best.isnan())
        best, chosen = torch.where(larger, value, best), torch.where(larger, token, chosen)
    return chosen.to(torch.int64)
