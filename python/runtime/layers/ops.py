"""The block operations that models are written in.

A model starts the stream with `s = embed(ids, table, attn_norm)`. A transformer block is six operations, which a device may implement with
fused kernels:

    qkv = norm_linear(s, attn_norm, qkv_proj)
    q   = rope_and_cache(qkv, ...)              # writes K and V into the pool
    a   = attention(q)
    s   = linear_add(a, o_proj, s, mlp_norm)    # the norm that reads s next
    m   = norm_gate_up(s, mlp_norm, gate_up_proj)
    s   = linear_add(m, down_proj, s, next_norm)

The residual stream is float32 for every weight dtype: hidden states of real models reach 2e4, where neighbouring bfloat16 numbers differ by
128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.layers.activation import Activation
from runtime.layers.attention.base import AttentionSpec
from runtime.layers.bounded_head import BoundedHead, HeadWithCopy
from runtime.layers.candidate_head import CandidateHead
from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.draft_input import DraftInput
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.gemm.gemm import Gemm, PassTimer
from runtime.layers.latent_heads import LatentHeads, NewRows
from runtime.layers.linear import Linear
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import Router, Routing
from runtime.layers.moe.token_exchange import TokenExchange
from runtime.layers.norm import RMSNorm
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import Rope, RotaryHeads
from runtime.layers.row_norms import RowNorms
from runtime.mem_cache.state_pool import StatePass, StatePool

Runs = Iterable[Callable[[], object]]
"""Calls that run kernels, to compile them."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream.

    Attributes:
        h: float32 [T, hidden].
        norm: the norm that reads `h` next, if it is deferred or computed.
        deferred: data that the operation which wrote `h` stored for `norm`; only operations read it.
        normed: `norm(h)` [T, hidden] in the model's dtype, if the operation that wrote `h` computed it.
        in_prompt: whether the rows belong to a prompt pass, in which weights in int8, int4 and bfloat16 may have other GEMMs on a CPU.
    """

    h: torch.Tensor
    norm: RMSNorm | None = None
    deferred: DeferredNorm | None = None
    normed: torch.Tensor | None = None
    in_prompt: bool = False


@dataclass(frozen=True, slots=True)
class LatentRows:
    """The rows of latent attention's first projection.

    Attributes:
        rows: [T, q_columns + row_dim] in the model's dtype, before their norms.
        deferred: data that the projection stored for the norm of the queries' latent; only operations read it.
    """

    rows: torch.Tensor
    deferred: DeferredNorm | None = None


class BlockOps(Protocol):
    """The operations that models call. T tokens; activations in the model's dtype.

    A subclass inherits what a device without kernels for a special case does.
    """

    def embed(
        self, ids: torch.Tensor, table: torch.Tensor, next_norm: RMSNorm | None = None, scale: float = 1.0, in_prompt: bool = False
    ) -> Stream:
        """Start the stream: `table[ids] * scale` in float32.

        Args:
            ids: int64 [T].
            table: [V, hidden] in the model's dtype.
            next_norm: the norm that reads the stream first, which the operation may compute too.
            in_prompt: as in `Stream`.
        """
        ...

    def join(
        self, ids: torch.Tensor, table: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, layout: DraftInput
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The inputs of a draft head: embeddings and hidden states, joined as `layout` says.

        Args:
            ids, positions: int64 [T], the tokens and their positions.
            table: [V, hidden] in the model's dtype.
            states: [T, hidden], any float dtype.

        Returns:
            [T, 2 * hidden] in the model's dtype, and the start of the stream, a new float32 [T, hidden], or None by `layout.stream`.
        """
        ...

    def norm(self, h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of float32 `h` [T, hidden], in `dtype`."""
        ...

    def linear(self, x: torch.Tensor, linear: Linear, in_prompt: bool = False) -> torch.Tensor:
        """`linear(x)`, [T, out], without `reduce`; `x` in the model's dtype. `in_prompt`: as in `Stream`."""
        ...

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        """`linear(norm(h))`, [T, out] in the model's dtype."""
        ...

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, next_norm: RMSNorm | None = None) -> Stream:
        """GEMM, all-reduce, add: `h + linear.reduce(linear(x))` in float32, possibly in the storage of `h`.
        `next_norm`: the norm that reads the stream next, which the operation may compute or prepare too.
        """
        ...

    def add_normed(
        self, x: torch.Tensor, norm: RMSNorm, stream: Stream, next_norm: RMSNorm | None = None, factor: torch.Tensor | None = None
    ) -> Stream:
        """`(h + norm(x)) * factor` in float32, possibly in the storage of `h`.

        Args:
            x: [T, hidden] in the model's dtype.
            next_norm: the norm that reads the stream next, which the operation may compute too.
            factor: [1]; None for 1.
        """
        ...

    def norm_gate_up(self, stream: Stream, norm: RMSNorm, gate_up: Linear, activation: Activation = Activation.SILU) -> torch.Tensor:
        """`activation(gate) * up` of the normed stream, [T, intermediate]; `gate_up` has the gate's rows, then the up projection's."""
        ...

    def route(self, x: torch.Tensor, router: Router) -> Routing:
        """The experts of each row of `x` [T, hidden], in the model's dtype. Source: `layers/moe/definition.py`."""
        ...

    def norm_route(self, stream: Stream, norm: RMSNorm, router: Router) -> tuple[torch.Tensor, Routing]:
        """`norm(h)` [T, hidden] in the model's dtype, and the experts of each of its rows."""
        ...

    def experts(self, x: torch.Tensor, experts: Experts, routing: Routing, in_prompt: bool = False) -> torch.Tensor:
        """The weighted sum of the outputs of each row's experts on this rank: [T, hidden] in float32 or the model's dtype.

        `in_prompt`: rows of a prompt pass.
        """
        ...

    def experts_add(
        self, x: torch.Tensor, experts: Experts, routing: Routing, stream: Stream, next_norm: RMSNorm | None, addend: torch.Tensor | None
    ) -> Stream:
        """Experts, all-reduce, add: `h` plus the sum over the ranks of `experts(x)` and `addend` [T, hidden], possibly in the storage of
        `h`.

        `next_norm`: the norm that reads the stream next, which the operation may compute or prepare too.
        """
        ...

    def add_scattered(self, part: torch.Tensor, exchange: TokenExchange, stream: Stream, next_norm: RMSNorm | None) -> Stream:
        """`h` plus the sum over the attention groups of this group's rows of `part`, possibly in the storage of `h`.

        Args:
            part: [groups * rows, hidden], sums of a rank's experts for the tokens that `exchange` gathered.
            next_norm: as for `experts_add`.
        """
        ...

    def norm_rows(self, qkv: torch.Tensor, norms: RowNorms) -> torch.Tensor:
        """`norms(qkv)`: qkv [T, (H + 2 G) * head_dim] with q and k normed, in the same storage."""
        ...

    def rope_and_cache(self, qkv: torch.Tensor, heads: RotaryHeads, layer_id: int, context: PassContext) -> torch.Tensor:
        """Norm q and k per head if `heads` has norms, rotate them, and write k and v of layer `layer_id` to the batch's slots.

        Args:
            qkv: [T, (H + 2 G) * head_dim].

        Returns:
            q [T, H, head_dim].
        """
        ...

    def project_latent(self, stream: Stream, norm: RMSNorm, linear: Linear, q_norm: RMSNorm | None) -> LatentRows:
        """`linear(norm(h))`. `q_norm`: the norm of the queries' latent, the first columns, which the operation may prepare."""
        ...

    def project_queries(self, latent: LatentRows, q_proj: Linear, q_norm: RMSNorm) -> torch.Tensor | None:
        """`q_proj(q_norm(latent))`, [T, H * query_dim], if `project_latent` has prepared the norm; by default it does not."""
        return None

    def write_latent(
        self, rows: torch.Tensor, heads: LatentHeads, layer_id: int, context: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm the latents of queries and keys, rotate the shared key, and write the latent KV rows of layer `layer_id`
        to the batch's slots.

        Args:
            rows: [T, q_columns + row_dim].

        Returns:
            The queries' columns [T, q_columns], normed if they are a latent, and the KV rows [T, row_dim], contiguous.
        """
        ...

    def rotate(self, x: torch.Tensor, rope: Rope, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Rotate `x` [T, H, rope.dim] by `positions` int64 [T] into `out`, which may be `x`; both may be views."""
        ...

    def absorb(
        self, q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, in_prompt: bool = False
    ) -> torch.Tensor:
        """Queries over latent rows: the first columns of each head times its keys, and the others rotated.

        Args:
            q: [T, H, query_dim]; may be a view.
            key: [H, nope_dim, kv_rank], the key half of `kv_b_proj`; heads may be strided.
            positions: int64 [T].
            in_prompt: as in `Stream`.

        Returns:
            [T, H, row_dim], contiguous.
        """
        ...

    def absorb_and_write(
        self, q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, new: NewRows
    ) -> torch.Tensor | None:
        """`absorb`, and the KV rows as by `write_latent`, in one kernel; None, with nothing written, if no kernel can."""
        return None

    def project_values(self, attended: torch.Tensor, value: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """Values of each head from its weighted sum of latents.

        Args:
            attended: [T, H, kv_rank].
            value: [H, value_dim, kv_rank], the value half of `kv_b_proj`; heads may be strided.
            in_prompt: as in `Stream`.

        Returns:
            [T, H, value_dim], contiguous.
        """
        ...

    def prompt_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        """Causal attention of whole prompts over their own keys: q and k [T, H, dim], v [T, H, value_dim] -> [T, H, value_dim]."""
        ...

    def begin_states(self, states: StatePool, batch: ForwardBatch) -> StatePass:
        """Begin a pass over recurrent states, as `StatePool.begin`."""
        return states.begin(batch.req_pool_indices, batch.seq_lens, batch.qo_indptr)

    def delta_rule(
        self, rows: torch.Tensor, gates: torch.Tensor, heads: DeltaHeads, layer: int, states: StatePass, batch: ForwardBatch
    ) -> torch.Tensor:
        """Convolution, gates and the gated delta rule over the recurrent states of `layer`, in which the tokens are applied or stored.

        Args:
            rows: [T, C], queries, keys and values before the convolution; may be a view of wider rows.
            gates: [T, 2 * H], the inputs of each head's rate, then of its decay.
            layer: its number in `states.layers`.

        Returns:
            [T, H * value_dim]. Source: `layers/delta/definition.py`.
        """
        ...

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """`norm` of each head of x [T, H * dim], times SiLU of the gate [T, H * dim], which may be a view of wider rows; `norm` has dim
        columns.
        """
        ...

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x` times the sigmoid of `gate`, both [T, n]: in the dtype of `x`, possibly in its storage."""
        ...

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        """`head(x)` in float32, [N, vocab], written to `out` if given."""
        ...

    def greedy(self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The argmax of each row of `logits(x, head)`, the first of equal entries: int64 [N], written to `tokens` if given.
        `logits` float32 [N, vocab] is written if given; otherwise the logits may never be stored.
        """
        ...

    def candidate_head(self, head: Linear) -> CandidateHead | None:
        """A draft's LM head with a copy in 8 bits, which `autotune` drops if it is never faster; None where it cannot be."""
        return None

    def bounded_head(self, head: Linear) -> BoundedHead | None:
        """An LM head with a copy in int8 that proves its argmax, which `autotune` drops if it is never faster; None where it cannot be."""
        return None

    def greedy_by_copy(
        self, x: torch.Tensor, head: HeadWithCopy, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int64 [N], written to `tokens` if given: the argmax of each row of `logits(x, head.own)`, for a head with candidates nearly
        always.

        `logits` float32 [N, vocab] receives at least the logits of these tokens if given. By default all tokens are scored.
        """
        return self.greedy(x, head.own, tokens, logits)

    def autotune(
        self, gemms: Iterable[Gemm], rows: Iterable[int], others: Runs = (), prompt_rows: Iterable[int] = (), timer: PassTimer | None = None
    ) -> dict[str, str]:
        """Choose the fastest kernel for each of a model's GEMMs, given in the order of execution, at these numbers of rows.
        Call it before any graph is captured; weights may be random.

        Args:
            rows: numbers of rows of decode passes.
            others: runs of other kernels, compiled together with these if these need compilation.
            prompt_rows: numbers of rows of prompt passes, only a few of which have logits.
            timer: passes in which kernels of almost equal speed are compared; None if the times of GEMMs alone decide.

        Returns:
            A line per GEMM, for the log and the server's info; empty if there is nothing to choose.
        """
        return {}
