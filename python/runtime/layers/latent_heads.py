"""The layout of latent attention's rows and heads: widths, norms and rotary table; and the rows that a pass writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The layout of the rows of multi-head latent attention.

    A latent KV row is a normed latent of `kv_rank` columns and one rotated key of `rope.dim` columns that all heads share.

    Attributes:
        num_heads: H, the heads of this rank.
        nope_dim: unrotated columns of a query and of a key.
        value_dim: columns of a value.
        kv_norm: over the latent; its width is `kv_rank`.
        rope: rotates the shared key and the end of each query.
        q_norm: over the queries' latent; None if queries are projected in one step.
    """

    num_heads: int
    nope_dim: int
    value_dim: int
    kv_norm: RMSNorm
    rope: Rope
    q_norm: RMSNorm | None = None

    @property
    def kv_rank(self) -> int:
        """Columns of the latent."""
        return self.kv_norm.weight.shape[0]

    @property
    def row_dim(self) -> int:
        """Columns of a latent KV row: the latent and the shared key."""
        return self.kv_rank + self.rope.dim

    @property
    def query_dim(self) -> int:
        """Columns of a query and of a key: unrotated and rotated."""
        return self.nope_dim + self.rope.dim

    @property
    def q_columns(self) -> int:
        """Columns of the queries in the rows of the first projection: the queries' latent, or all heads."""
        return self.num_heads * self.query_dim if self.q_norm is None else self.q_norm.weight.shape[0]


@dataclass(frozen=True, slots=True)
class NewRows:
    """The KV rows that a pass writes, and where.

    Attributes:
        rows: [T, columns] of the first projection; the last `row_dim` columns are a latent before its norm and a key before its rotation.
        slots: int64 [T] contiguous.
        cache: [num_slots, 1, row_dim] contiguous.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor
