"""The attention of a block: its interface, and grouped-query attention over keys and values per head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch

from runtime.layers.attention.base import AttentionSpec
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import Rope
from runtime.layers.row_norms import RowNorms
from runtime.mem_cache.state_pool import StateSpec

Rows = TypeVar("Rows")


class AttentionLayer(Protocol[Rows]):
    """The interface of a block's attention: project, write KV and attend, add the output to the residual stream. Subclass it explicitly.

    `Rows` are the results of its first projection, for T tokens.

    Attributes:
        o_proj: the output projection.
        ops: the model's block operations.
        kernel_launches: approximate number per eager pass.
    """

    o_proj: Linear
    ops: BlockOps
    kernel_launches: int

    def attention_spec(self) -> AttentionSpec | None:
        """Its description for the attention backend; None for linear attention, which stores no keys and values."""
        return None

    def state_spec(self) -> StateSpec | None:
        """The recurrent state that it keeps per request; None for attention over keys and values."""
        return None

    @property
    def active_parameters(self) -> int:
        """Weights that every token is multiplied by."""
        ...

    def weights_filled(self) -> None:
        """Compute derived weights. Called after loading."""

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """Its GEMMs to autotune, in order, between these norms."""
        ...

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Runs that compile its other kernels, which `gemms` and the backend do not cover, for any number of tokens."""
        return []

    def project(self, stream: Stream, norm: RMSNorm) -> Rows:
        """The first projection of the normed stream."""
        ...

    def project_rows(self, x: torch.Tensor, in_prompt: bool = False) -> Rows:
        """The first projection of rows [T, in] in the model's dtype. `in_prompt`: as in `Stream`."""
        ...

    def write_kv(self, qkv: Rows, context: PassContext) -> None:
        """Write KV of the rows of the first projection to the pool, and nothing else."""
        ...

    def attend(self, qkv: Rows, context: PassContext) -> torch.Tensor:
        """Write KV to the pool and attend: from the first projection to the input of `o_proj`, [T, H * value_dim]."""
        ...

    def add_output(self, attended: torch.Tensor, stream: Stream, next_norm: RMSNorm) -> Stream:
        """The stream plus the output projection of `attended`, possibly in the same storage."""
        return self.ops.linear_add(self.o_proj.own_columns(attended), self.o_proj, stream, next_norm)


class Attention(AttentionLayer[torch.Tensor]):
    """`AttentionLayer`: grouped-query attention of one layer, or this rank's heads of it. Owner of its weights.

    Attributes:
        spec: its description for the attention backend: KV, scale, window, sinks, heads.
        heads: how a qkv row becomes heads, as in `spec`.
        qkv_proj: the first projection; its outputs are the rows [T, (H + 2 G) * head_dim].
        kernel_launches: approximate number per eager pass: norm, qkv, rotary and KV write, attention, output.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        qkv_proj: Linear,
        o_proj: Linear,
        ops: BlockOps,
        row_norms: RowNorms | None = None,
        early_rope: Rope | None = None,
    ) -> None:
        """`early_rope`: rotates q and k before the norms of `spec.heads`, whose own table then rotates nothing."""
        assert spec.heads is not None, "attention per head needs heads"
        scaled = spec.heads.rope.query_scales is not None
        assert not scaled or spec.heads.q_norm is None, "a norm per head would undo the scale of the queries"
        assert early_rope is None or early_rope.dim == spec.heads.head_dim, "whole heads are rotated before their norms"
        self._row_norms, self._early_rope = row_norms, early_rope
        self.kernel_launches = 5 + (0 if row_norms is None else row_norms.kernel_launches) + scaled + (early_rope is not None)
        self.spec, self.heads, self.qkv_proj, self.o_proj, self.ops = spec, spec.heads, qkv_proj, o_proj, ops

    def attention_spec(self) -> AttentionSpec:
        """Its description for the attention backend."""
        return self.spec

    @property
    def active_parameters(self) -> int:
        """Weights that every token is multiplied by."""
        return self.qkv_proj.num_parameters + self.o_proj.num_parameters

    def gemms(self, norm: RMSNorm | None, next_norm: RMSNorm | None) -> Iterator[Gemm]:
        """Its GEMMs, in order; the rows of the first are not normed if `norm` is None, and the output is not added to the stream if
        `next_norm` is None.
        """
        yield Gemm("linear", self.qkv_proj, norm)
        yield Gemm("linear" if next_norm is None else "linear_add", self.o_proj, next_norm, after_attention=True)

    def project(self, stream: Stream, norm: RMSNorm) -> torch.Tensor:
        """The qkv rows of the normed stream."""
        return self.ops.norm_linear(stream, norm, self.qkv_proj)

    def project_rows(self, x: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """The qkv rows of rows [T, in] in the model's dtype. `in_prompt`: as in `Stream`."""
        return self.ops.linear(x, self.qkv_proj, in_prompt)

    def write_kv(self, qkv: torch.Tensor, context: PassContext) -> None:
        """Write k and v to the pool."""
        self.ops.rope_and_cache(self._prepared(qkv, context), self.heads, self.spec.layer_id, context)

    def attend(self, qkv: torch.Tensor, context: PassContext) -> torch.Tensor:
        """Write k and v to the pool and attend: [T, H * head_dim], the dtype of `qkv`; in one kernel if the backend has one."""
        qkv = self._prepared(qkv, context)
        attended = context.backend.forward_rows(qkv, self.spec, context.batch)
        if attended is not None:
            return attended
        q = self.ops.rope_and_cache(qkv, self.heads, self.spec.layer_id, context)
        return context.backend.forward(q, self.spec, context.batch)

    def _prepared(self, qkv: torch.Tensor, context: PassContext) -> torch.Tensor:
        """The qkv rows with q and k normed over all heads or rotated before their norms, and queries scaled by position, if the model does
        so; in the same storage.
        """
        if self._early_rope is not None:
            rotated = qkv.unflatten(1, (-1, self.heads.head_dim))[:, : self.heads.num_q_heads + self.heads.num_kv_heads]
            self.ops.rotate(rotated, self._early_rope, context.batch.positions, rotated)
        if self._row_norms is not None:
            qkv = self.ops.norm_rows(qkv, self._row_norms)
        scales = context.query_scales(self.heads.rope)
        if scales is not None:
            # A rotation is linear, so queries may be scaled before it. Here no backend needs to know of the scale, not even the kernel
            # that rotates and attends, and the operation can be captured: positions and the table are on the device.
            qkv[:, : self.heads.num_q_heads * self.heads.head_dim].mul_(scales)
        return qkv

    def output(self, attended: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """The output projection of `attended`, [T, hidden]. `in_prompt`: as in `Stream`."""
        return self.o_proj.reduce(self.ops.linear(self.o_proj.own_columns(attended), self.o_proj, in_prompt))
