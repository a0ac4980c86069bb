"""The block operations that models are written in, and their plain torch form.

A transformer block is six operations, so that a device may fuse what it can:

    qkv = norm_linear(s, attn_norm, qkv_proj)
    q   = rope_and_cache(qkv, ...)              # writes K and V into the pool
    a   = attention(q)
    s   = linear_add(a, o_proj, s, mlp_norm)    # the norm that reads s next
    m   = norm_gate_up(s, mlp_norm, gate_up_proj)
    s   = linear_add(m, down_proj, s, next_norm)

The residual stream is float32 in every dtype: hidden states of real models reach 2e4, where bfloat16 steps by 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.layers.gemm.deferred_norm import NormAhead
from runtime.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Weight [H] and epsilon of one RMS norm."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream.

    Attributes:
        h: float32 [T, hidden].
        norm: the norm that reads `h` next, where something was left for it.
        ahead: what the operation that wrote `h` left for `norm`; only the operations look at either.
        in_prompt: whether the rows are of a prompt pass; int8 on a CPU computes these alike however many share the pass.
    """

    h: torch.Tensor
    norm: RMSNorm | None = None
    ahead: NormAhead | None = None
    in_prompt: bool = False


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
    """What a model calls. T tokens; activations in the model's dtype."""

    def norm(self, h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of float32 `h` [T, hidden], in `dtype`."""
        ...

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """`linear(x)`, [T, out]; `x` in the model's dtype."""
        ...

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        """`linear(norm(h))`, [T, out] in the model's dtype."""
        ...

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, following: RMSNorm | None = None) -> Stream:
        """`h + linear(x)` in float32; may reuse the storage of `h`. `following`: the norm that reads it next, where there is one."""
        ...

    def norm_gate_up(self, stream: Stream, norm: RMSNorm, gate_up: Linear) -> torch.Tensor:
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
