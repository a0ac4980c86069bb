"""The block operations in plain torch: the implementation for CPUs, and the reference for all others."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from runtime.layers.absorption import absorb_by_bmm, project_by_bmm
from runtime.layers.activation import Activation, gated
from runtime.layers.attention.base import AttentionSpec
from runtime.layers.delta import definition
from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.draft_input import DraftInput, StreamStart
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels.argmax import argmax
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.linear import Linear
from runtime.layers.moe.definition import route, run_experts
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import Router, Routing
from runtime.layers.moe.token_exchange import TokenExchange
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, LatentRows, Stream
from runtime.layers.pass_context import PassContext
from runtime.layers.quantization.fp8 import E4M3_MAX
from runtime.layers.rope import Rope, RopeFactors, RotaryHeads
from runtime.layers.row_norms import RowNorms
from runtime.mem_cache.state_pool import StatePass


class TorchOps(BlockOps):
    """The block operations without fusion. Stateless; norms, activations and additions are computed in float32."""

    def embed(
        self, ids: torch.Tensor, table: torch.Tensor, next_norm: RMSNorm | None = None, scale: float = 1.0, in_prompt: bool = False
    ) -> Stream:
        """`table[ids] * scale` in float32."""
        h = torch.embedding(table, ids).float()
        return Stream(h if scale == 1.0 else h.mul_(scale), in_prompt=in_prompt)

    def join(
        self, ids: torch.Tensor, table: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, layout: DraftInput
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings concatenated with hidden states [T, 2 * hidden], and the start of the stream float32 [T, hidden] or None."""
        token, state = torch.embedding(table, ids), states
        if layout.blank_start:
            token = token.masked_fill(positions[:, None] == 0, 0.0)
        if layout.norms is not None:
            token, state = (rms_norm(x, norm) for x, norm in zip((token, state), layout.norms, strict=True))
        token, state = token.to(table.dtype), state.to(table.dtype)
        rows = torch.cat((state, token) if layout.state_first else (token, state), dim=1)
        if layout.stream is StreamStart.PROJECTION:
            return rows, None
        return rows, (states if layout.stream is StreamStart.STATE else state).to(torch.float32, copy=True)

    def norm(self, h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of float32 `h` [T, hidden], in `dtype`."""
        return rms_norm(h, norm).to(dtype)

    def linear(self, x: torch.Tensor, linear: Linear, in_prompt: bool = False) -> torch.Tensor:
        """`linear(x)`, [T, out]."""
        return linear(x, in_prompt)

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        """`linear(norm(h))`, [T, out] in the model's dtype."""
        return linear(rms_norm(stream.h, norm).type_as(norm.weight), stream.in_prompt)

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, next_norm: RMSNorm | None = None) -> Stream:
        """`h + linear.reduce(linear(x))` in float32, in the storage of `h`."""
        stream.h.add_(linear.reduce(linear(x, stream.in_prompt)))
        return stream

    def add_normed(
        self, x: torch.Tensor, norm: RMSNorm, stream: Stream, next_norm: RMSNorm | None = None, factor: torch.Tensor | None = None
    ) -> Stream:
        """`(h + norm(x)) * factor` in float32, in the storage of `h`."""
        stream.h.add_(rms_norm(x, norm))
        if factor is not None:
            stream.h.mul_(factor)
        return stream

    def norm_gate_up(self, stream: Stream, norm: RMSNorm, gate_up: Linear, activation: Activation = Activation.SILU) -> torch.Tensor:
        """`activation(gate) * up` of the normed stream, [T, intermediate]."""
        return gated(activation, self.norm_linear(stream, norm, gate_up))

    def route(self, x: torch.Tensor, router: Router) -> Routing:
        """The experts of each row of `x`."""
        return route(x, router)

    def norm_route(self, stream: Stream, norm: RMSNorm, router: Router) -> tuple[torch.Tensor, Routing]:
        """`norm(h)` [T, hidden] in the model's dtype, and its experts."""
        x = self.norm(stream.h, norm, norm.weight.dtype)
        return x, self.route(x, router)

    def experts(self, x: torch.Tensor, experts: Experts, routing: Routing, in_prompt: bool = False) -> torch.Tensor:
        """The weighted sum of the outputs of each row's experts, float32 [T, hidden]."""
        return run_experts(x, experts, routing, in_prompt)

    def experts_add(
        self,
        x: torch.Tensor,
        experts: Experts,
        routing: Routing,
        stream: Stream,
        next_norm: RMSNorm | None = None,
        addend: torch.Tensor | None = None,
    ) -> Stream:
        """`h` plus the sum over the ranks of `experts(x)` and of `addend`, in the storage of `h`."""
        part = run_experts(x, experts, routing, stream.in_prompt)
        part = part if addend is None else part.add_(addend)
        stream.h.add_(experts.group.all_reduce(part))
        return stream

    def add_scattered(self, part: torch.Tensor, exchange: TokenExchange, stream: Stream, next_norm: RMSNorm | None = None) -> Stream:
        """`h` plus this group's rows of the sum of `part`, in the storage of `h`."""
        stream.h.add_(exchange.scatter_sum(part, len(stream.h)))
        return stream

    def norm_rows(self, qkv: torch.Tensor, norms: RowNorms) -> torch.Tensor:
        """`norms(qkv)`."""
        return norms(qkv)

    def rope_and_cache(self, qkv: torch.Tensor, heads: RotaryHeads, layer_id: int, context: PassContext) -> torch.Tensor:
        """Norm and rotate q and k, write k and v to their slots, return q [T, H, head_dim]."""
        num_q, rows = heads.num_q_heads, qkv.view(qkv.shape[0], -1, heads.head_dim)
        query_key, value = rows[:, : num_q + heads.num_kv_heads], rows[:, -heads.num_kv_heads :]
        if heads.v_norm is not None:
            value = rms_norm(value, heads.v_norm)
        if heads.q_norm is not None and heads.k_norm is not None:
            query_key = torch.cat((rms_norm(query_key[:, :num_q], heads.q_norm), rms_norm(query_key[:, num_q:], heads.k_norm)), dim=1)
        query_key = rotate_by(query_key, heads.rope, context.rope_factors(heads.rope)).type_as(qkv)
        for i, (cache, new) in enumerate(zip(context.kv_pool.flat(layer_id), (query_key[:, num_q:], value), strict=True)):
            if heads.kv_scales is None:
                cache.index_copy_(0, context.batch.out_cache_loc, finite(new.type_as(cache)))
            else:
                stored = finite(new.float() / heads.kv_scales[i]).clamp_(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
                cache.view(torch.uint8).index_copy_(0, context.batch.out_cache_loc, stored.view(torch.uint8))
        return query_key[:, :num_q]

    def project_latent(self, stream: Stream, norm: RMSNorm, linear: Linear, q_norm: RMSNorm | None) -> LatentRows:
        """`linear(norm(h))`."""
        return LatentRows(self.norm_linear(stream, norm, linear))

    def write_latent(
        self, rows: torch.Tensor, heads: LatentHeads, layer_id: int, context: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm the latents, rotate the shared key, write the latent KV rows; returns the queries' columns and the KV rows."""
        q, latent, key = rows.split((heads.q_columns, heads.kv_rank, heads.rope.dim), dim=1)
        if heads.q_norm is not None:
            q = rms_norm(q, heads.q_norm).to(rows.dtype)
        shared = rotate_by(key[:, None], heads.rope, context.rope_factors(heads.rope))[:, 0]
        kv = torch.cat((rms_norm(latent, heads.kv_norm), shared), dim=1).to(rows.dtype)
        cache, _ = context.kv_pool.flat(layer_id)
        cache.index_copy_(0, context.batch.out_cache_loc, finite(kv[:, None].to(cache.dtype)))
        return q, kv

    def rotate(self, x: torch.Tensor, rope: Rope, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Rotate `x` [T, H, rope.dim] into `out`."""
        out.copy_(rotate(x, rope, positions))

    def absorb(
        self, q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, in_prompt: bool = False
    ) -> torch.Tensor:
        """Queries over latent rows, [T, H, row_dim]."""
        query = absorb_by_bmm(q, heads, key, in_prompt)
        self.rotate(q[..., heads.nope_dim :], heads.rope, positions, query[..., heads.kv_rank :])
        return query

    def project_values(self, attended: torch.Tensor, value: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """Values of each head, [T, H, value_dim]."""
        return project_by_bmm(attended, value, in_prompt)

    def prompt_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        """Causal attention of whole prompts, one after another: [T, H, value_dim]."""
        assert batch.extend_lens is not None, "a pass of prompts"
        parts = zip(*(x.transpose(0, 1).split(batch.extend_lens.tolist(), dim=1) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*one, is_causal=True, scale=layer.scale) for one in parts]
        return torch.cat(outs, dim=1).transpose(0, 1)

    def delta_rule(
        self, rows: torch.Tensor, gates: torch.Tensor, heads: DeltaHeads, layer: int, states: StatePass, batch: ForwardBatch
    ) -> torch.Tensor:
        """The outputs of linear attention, [T, H * value_dim]."""
        return definition.delta_rule(rows, gates, heads, layer, states, batch)

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """The norm of each head times SiLU of its gate, [T, H * dim]."""
        return definition.gated_norm(x, gate, norm.weight, norm.eps)

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x` times the sigmoid of `gate`, computed in float32."""
        # Torch's own sigmoid rounds the last entries of a tensor, and of each thread's part, differently.
        return (x.float() / gate.float().neg().exp_().add_(1.0)).to(x.dtype)

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        """`head(x)` in float32, [N, vocab], written to `out` if given."""
        scores = head(x).float()
        return scores if out is None else out.copy_(scores)

    def greedy(self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The argmax of each row of `logits(x, head)`, int64 [N]; written to `tokens` if given, the logits to `logits` if given."""
        return argmax(self.logits(x, head, logits), tokens)


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in float32. Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    `sqrt(mean(x ** 2) + eps)` is computed as `hypot(norm(x) / size ** 0.5, eps ** 0.5)`.
    """
    x, (inverse_root, floor) = x.float(), _norm_constants(x.shape[-1], norm.eps)
    rms = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(inverse_root), floor)
    return x.div(rms).mul_(norm.weight)


@functools.cache
def _norm_constants(size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`size ** -0.5` and `eps ** 0.5` as cached tensors: converting a number takes torch as long as an operation on a few rows."""
    return torch.tensor(size**-0.5), torch.tensor(eps**0.5)


def finite(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros for NaN and infinity, because 0 * NaN is NaN: masked keys of a freed page could otherwise spoil another request's
    output.
    """
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def rotate(x: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the first `rope.dim` entries of [T, heads, head_dim] by `positions` int64 [T]; float32."""
    return rotate_by(x, rope, rope.factors(positions))


def rotate_by(x: torch.Tensor, rope: Rope, factors: RopeFactors) -> torch.Tensor:
    """`rotate` by the factors of the positions."""
    own, others = factors
    whole = rope.dim == x.shape[-1]
    turned = (x if whole else x[..., : rope.dim]).float()
    partners = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rope.interleaved else turned.roll(rope.dim // 2, -1)
    turned = (turned * own).addcmul_(partners, others)
    return turned if whole else torch.cat((turned, x[..., rope.dim :].float()), dim=-1)
