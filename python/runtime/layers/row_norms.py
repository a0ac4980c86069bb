"""RMS norms of q and k over all heads together, which may be sharded over several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.distributed.parallel_group import ALONE, ParallelGroup


@dataclass(frozen=True, slots=True)
class RowNorms:
    """Norms of a whole query row and a whole key row, before they are rotated.

    The mean square runs over the heads of all ranks: one exchange of two numbers per token.

    Attributes:
        q_weight, k_weight: this rank's shard of the weights, in the model's dtype.
        columns: columns of q and of k on all ranks, counting copies: the divisors of their sums of squares.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    columns: tuple[int, int]
    group: ParallelGroup = ALONE

    @property
    def kernel_launches(self) -> int:
        """Approximate number of launches: one exchange kernel, or two kernels and an all-reduce of several ranks, which counts as eight
        because it takes that much memory in a graph.
        """
        return 1 if self.group.fused is not None else 2 if self.group.size == 1 else 10

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Norm q and k in qkv rows [T, q + k + v columns] of this rank, in place. Does not synchronise with the device."""
        first, own = len(self.q_weight), len(self.q_weight) + len(self.k_weight)
        q, k = qkv[:, :first].float(), qkv[:, first:own].float()
        squares = torch.stack([part.square().sum(dim=1) / columns for part, columns in zip((q, k), self.columns, strict=True)], dim=1)
        scale = torch.rsqrt(self.group.all_reduce(squares) + self.eps)
        qkv[:, :first] = (q * scale[:, :1]) * self.q_weight
        qkv[:, first:own] = (k * scale[:, 1:]) * self.k_weight
        return qkv
