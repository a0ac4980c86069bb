"""The block operations that models are written in, and their plain torch form.

A transformer block is six operations, so that a device may fuse what it can:

    qkv = norm_linear(h, attn_norm, qkv_proj)
    q   = rope_and_cache(qkv, ...)              # writes K and V into the pool
    a   = attention(q)
    h   = linear_add(a, o_proj, h)
    m   = norm_gate_up(h, mlp_norm, gate_up_proj)
    h   = linear_add(m, down_proj, h)

The residual stream `h` is float32 in every dtype: hidden states of real models reach 2e4, where bfloat16 steps by 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Weight [H] and epsilon of one RMS norm."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the columns of a fused qkv row are split: H query heads, G key heads, G value heads, each `head_dim` wide."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, "neox" halves. `cos_sin` float32 [max_positions, head_dim]: cosines of the head_dim/2 angles, then sines."""

    cos_sin: torch.Tensor


class BlockOps(Protocol):
    """What a model calls. T tokens; `h` float32 [T, hidden]; activations in the model's dtype."""

    def norm(self, h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of the residual stream, [T, hidden] in `dtype`."""
        ...

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """`linear(x)`, [T, out]; `x` in the model's dtype."""
        ...

    def norm_linear(self, h: torch.Tensor, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        """`linear(norm(h))`, [T, out] in the model's dtype."""
        ...

    def linear_add(self, x: torch.Tensor, linear: Linear, h: torch.Tensor) -> torch.Tensor:
        """`h + linear(x)` in float32; may reuse the storage of `h`."""
        ...

    def norm_gate_up(self, h: torch.Tensor, norm: RMSNorm, gate_up: Linear) -> torch.Tensor:
        """`silu(gate) * up` of the normed stream; `gate_up` holds the gate's rows, then the up's. [T, intermediate]."""
        ...

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        rope: Rope,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Norm q and k per head where asked, rotate them, write k and v to slots `out_cache_loc` int64 [T] of the flat caches
        [num_slots, G, head_dim], and return q [T, H, head_dim]."""
        ...

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        """`head(x)` in float32, [N, vocab], written to `out` where given."""
        ...

    def greedy(self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The argmax of each row of `logits(x, head)`, of equal entries the first: int64 [N], written to `tokens` where given.

        `logits` float32 [N, vocab] is written where given; where not, they may never be stored.
        """
        ...
