"""Cross-entropy against the target's distribution; the LM head's GEMM and its gradient run in chunks of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 8192
"""Rows per chunk of logits: 8192 x 8192 float32 is 256 MiB."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distribution at N positions.

    Attributes:
        probs: [N, Vd], the distribution over the draft's vocabulary; rows sum to one.
        best: int64 [N], the draft id of the most likely token, -1 if the draft has none.
    """

    probs: torch.Tensor
    best: torch.Tensor

    def rows(self, index: torch.Tensor) -> Teacher:
        """The rows of `index`, int64 [n]."""
        return Teacher(self.probs[index], self.best[index])


@torch.no_grad()
def teach(scores: torch.Tensor, vocabulary: torch.Tensor, to_draft: torch.Tensor, dtype: torch.dtype) -> Teacher:
    """The teacher from logits float32 [N, V], with `vocabulary` int64 [Vd] and `to_draft` int64 [V], in `dtype`."""
    return Teacher(scores[:, vocabulary].softmax(-1).to(dtype), to_draft[scores.argmax(-1)])


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes gradients together with the loss and scales them in backward, so that logits are never kept."""

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
    """The sum over rows of the cross-entropy of `x @ weight.T` with the teacher.

    Rows whose most likely token is not in the draft's vocabulary are excluded, because none of their drafts can be
    accepted.

    Args:
        x: float32 [N, H], after the head's norm.
        weight: float32 [Vd, H].
        hard_share: weight of the target's most likely token; the rest is its distribution. Greedy acceptance needs the
            first, sampled acceptance the second.
        dtype: dtype of the GEMMs.

    Returns:
        The sum, float32, and the most likely draft ids, int64 [N].
    """
    with torch.autocast(x.device.type, enabled=False):
        return _ChunkedCrossEntropy.apply(x, weight, teacher, hard_share, dtype, chunk)  # type: ignore[return-value]
