"""Cross-entropy against the target's distribution; the LM heads' GEMMs and the gradient run in chunks of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 8192
"""Rows per chunk of logits: 8192 x 8192 float32 is 256 MiB."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target at N positions. Its distribution over the draft's vocabulary is computed on demand.

    Attributes:
        hidden: [N, H], the target's states after its final norm.
        weight: [Vd, H], the rows of the target's LM head for the draft's vocabulary.
        best: int64 [N], the draft id of the target's most likely token; -1 if it is not in the draft's vocabulary.
        cap: the target's limit on its logits; 0 for none.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    best: torch.Tensor
    cap: float = 0.0

    def rows(self, index: torch.Tensor) -> Teacher:
        """The rows of `index`, int64 [n]."""
        return Teacher(self.hidden[index], self.weight, self.best[index], self.cap)

    def scores(self, rows: slice) -> torch.Tensor:
        """Logits over the draft's vocabulary, [n, Vd], float32."""
        scores = product(self.hidden[rows], self.weight)
        return (scores / self.cap).tanh() * self.cap if self.cap else scores


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` as float32; on CUDA the result of the GEMM is not rounded first."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return (x @ weight.T).float()


def compare(
    scores: torch.Tensor, taught: torch.Tensor, best: torch.Tensor, hard_share: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each row of logits, the most likely ids, and the gradient of the loss with respect to `scores`.

    Args:
        scores: [n, Vd], the draft's logits.
        taught: float32 [n, Vd], the target's logits.
        best, hard_share: see `cross_entropy`.

    Returns:
        float32 [n], int64 [n], and [n, Vd] in the dtype of `scores`.
    """
    if scores.is_cuda:
        from eagle_training.loss_kernel import compare_rows

        return compare_rows(scores, taught, best, hard_share)
    counted = (best >= 0).float()[:, None]
    log_probs = scores.float().log_softmax(-1)
    wanted = taught.softmax(-1) * (1.0 - hard_share)
    wanted.scatter_add_(1, best.clamp(min=0)[:, None], torch.full_like(counted, hard_share))
    losses = -(wanted * log_probs * counted).sum(-1)
    return losses, scores.argmax(-1), ((log_probs.exp() - wanted) * counted).to(scores.dtype)


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
            piece = x[rows].to(dtype)
            losses, guesses[rows], slope = compare(piece @ narrow.T, teacher.scores(rows), teacher.best[rows], hard_share)
            total += losses.sum()
            grad_x[rows] = (slope @ narrow).to(x.dtype)
            grad_weight += product(slope.T, piece.T).to(weight.dtype)
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
        hard_share: weight of the one-hot target at the most likely token; the rest is the weight of the target's distribution. Greedy
            acceptance needs the former, sampled acceptance the latter.
        dtype: dtype of the GEMMs.

    Returns:
        The sum, float32, and the most likely draft ids, int64 [N].
    """
    with torch.autocast(x.device.type, enabled=False):
        return _ChunkedCrossEntropy.apply(x, weight, teacher, hard_share, dtype, chunk)  # type: ignore[return-value]
