"""The layout of a fused qkv row: its heads, their norms and the rotary table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.layers.norm import RMSNorm

RopeFactors = tuple[torch.Tensor, torch.Tensor]
"""The factors of each entry of a head and of the entry that rotates with it; the sum of both products is the rotated entry."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary embedding of the first R entries of a head; the others are unchanged.

    Attributes:
        cos_sin: float32 [max_positions, R]: cosines of the R / 2 angles, then sines.
        interleaved: whether entries 2i and 2i + 1 rotate together (GPT-J), instead of i and i + R / 2 (NeoX).
        query_scales: float32 [max_positions], the factor of queries by position; None for 1. `Attention` applies it, not the rotation.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False
    query_scales: torch.Tensor | None = None

    @property
    def dim(self) -> int:
        """R, the number of rotated entries of a head."""
        return self.cos_sin.shape[1]

    def factors(self, positions: torch.Tensor) -> RopeFactors:
        """The factors for `positions` int64 [T]: float32 [T, 1, R] each."""
        cos, sin = self.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        if self.interleaved:
            return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@dataclass(frozen=True, slots=True)
class RotaryHeads:
    """How a fused qkv row becomes heads: H query heads, G key heads, G value heads, each `head_dim` wide.

    With `shared_kv` a row has H + G heads, and the values are the keys before their norm and rotation.

    Attributes:
        q_norm, k_norm: norms per head, before the rotation; both or neither.
        v_norm: norm per value head, or None; its weight is ones if the model has none.
        kv_scales: float32 [2], by which keys and values are divided before they are stored in 8 bits; None for a KV cache in the
            activations' dtype.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    v_norm: RMSNorm | None = None
    shared_kv: bool = False
    kv_scales: torch.Tensor | None = None
