"""The block operations in plain torch: the CPU's own, and the reference of every other form."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.layers.kernels.argmax import argmax
from runtime.layers.linear import Linear
from runtime.layers.ops import HeadLayout, RMSNorm, Rope, Stream


class TorchOps:
    """`BlockOps` without fusion. Stateless; in float32 arithmetic wherever the model's dtype is narrower."""

    def norm(self, h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of float32 `h` [T, hidden], in `dtype`."""
        return rms_norm(h, norm).to(dtype)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """`linear(x)`, [T, out]."""
        return linear(x)

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        """`linear(norm(h))`, [T, out] in the model's dtype."""
        return linear(rms_norm(stream.h, norm).to(norm.weight.dtype), stream.in_prompt)

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, following: RMSNorm | None = None) -> Stream:
        """`h + linear(x)` in float32, in the storage of `h`."""
        return Stream(stream.h.add_(linear(x, stream.in_prompt)), in_prompt=stream.in_prompt)

    def norm_gate_up(self, stream: Stream, norm: RMSNorm, gate_up: Linear) -> torch.Tensor:
        """`silu(gate) * up` of the normed stream, [T, intermediate]."""
        gate, up = self.norm_linear(stream, norm, gate_up).chunk(2, dim=1)
        return F.silu(gate).mul_(up)

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
        """Norm and rotate q and k, write k and v to their slots, return q [T, H, head_dim]."""
        num_q = layout.num_q_heads
        heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
        query_key, value = heads[:, : num_q + layout.num_kv_heads], heads[:, num_q + layout.num_kv_heads :]
        if q_norm is not None and k_norm is not None:
            query_key = torch.cat((rms_norm(query_key[:, :num_q], q_norm), rms_norm(query_key[:, num_q:], k_norm)), dim=1)
        query_key = rotate(query_key, rope, positions).to(qkv.dtype)
        k_cache.index_copy_(0, out_cache_loc, query_key[:, num_q:].to(k_cache.dtype))
        v_cache.index_copy_(0, out_cache_loc, value.to(v_cache.dtype))
        return query_key[:, :num_q]

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        """`head(x)` in float32, [N, vocab], written to `out` where given."""
        scores = head(x).float()
        return scores if out is None else out.copy_(scores)

    def greedy(self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The argmax of each row of `logits(x, head)`, int64 [N]; both written where given."""
        return argmax(self.logits(x, head, logits), tokens)


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in float32. Source: Zhang and Sennrich 2019, arXiv:1910.07467."""
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps)


def rotate(x: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, head_dim] by `positions` int64 [T], first half against second half; float32."""
    cos, sin = rope.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
