"""Cross-entropy against the target's distribution, with the LM head's product and its gradient made a piece of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 8192
"""Rows whose scores exist at once: 8192 x 8192 float32 is 256 MiB."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says at N positions.

    Attributes:
        probs: [N, Vd], its distribution over the draft's vocabulary, summing to one.
        best: int64 [N], the draft id of its likeliest token, -1 where the draft has none.
    """

    probs: torch.Tensor
    best: torch.Tensor

    def rows(self, index: torch.Tensor) -> Teacher:
        """Those of `index` int64 [n]."""
        return Teacher(self.probs[index], self.best[index])


@torch.no_grad()
def teach(scores: torch.Tensor, vocabulary: torch.Tensor, to_draft: torch.Tensor, dtype: torch.dtype) -> Teacher:
    """The teacher of scores float32 [N, V]; `vocabulary` int64 [Vd], `to_draft` int64 [V]; probabilities in `dtype`."""
    return Teacher(scores[:, vocabulary].softmax(-1).to(dtype), to_draft[scores.argmax(-1)])


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Scores are never kept: the gradients are made with the loss and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, teacher: Teacher, hard_share: float, dtype: torch.dtype, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        guesses = torch.empty(len(x), dtype=torch.int64, device=x.device)
        narrow = weight.to(dtype)
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            piece, best = x[rows].to(dtype), teacher.best[rows]
            counted = (best >= 0).float()[:, None]
            scores = (piece @ narrow.T).float()
            guesses[rows] = scores.argmax(-1)
            log_probs = scores.log_softmax(-1)
            wanted = teacher.probs[rows].float() * (1.0 - hard_share)
            wanted.scatter_add_(1, best.clamp(min=0)[:, None], torch.full_like(counted, hard_share))
            total -= (wanted * log_probs * counted).sum()
            slope = ((log_probs.exp_() - wanted) * counted).to(dtype)
            grad_x[rows] = (slope @ narrow).to(x.dtype)
            grad_weight += (slope.T @ piece).to(weight.dtype)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(guesses)
        return total, guesses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grads[0], grad_weight * grads[0], None, None, None, None


def cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, teacher: Teacher, hard_share: float, dtype: torch.dtype, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over rows of the cross-entropy of `x @ weight.T` with the teacher.

    Rows whose likeliest token the draft cannot say count for nothing: no guess of theirs can be accepted.

    Args:
        x: float32 [N, H], after the head's norm.
        weight: float32 [Vd, H].
        hard_share: how much of what is wanted is the target's likeliest token; the rest is its distribution. Greedy acceptance asks for
            the first, sampled acceptance for the second.
        dtype: of the products.

    Returns:
        The sum, float32, and the likeliest draft ids int64 [N].
    """
    with torch.autocast(x.device.type, enabled=False):
        return _ChunkedCrossEntropy.apply(x, weight, teacher, hard_share, dtype, chunk)  # type: ignore[return-value]
