"""What turns projected rows into latent KV rows and heads: their widths, their norms and their rotary table."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """How the rows of multi-head latent attention are laid out.

    A latent KV row is a normed latent of `kv_rank` columns and one rotated key of `rope.dim` columns that all heads share.

    Attributes:
        num_heads: H, the heads of this rank.
        nope_dim: columns of a query and of a key that are not rotated.
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
        """Columns of a query and of a key, not rotated and rotated."""
        return self.nope_dim + self.rope.dim

    @property
    def q_columns(self) -> int:
        """Columns of the queries in the rows of the first projection: their latent, or all heads."""
        return self.num_heads * self.query_dim if self.q_norm is None else self.q_norm.weight.shape[0]
