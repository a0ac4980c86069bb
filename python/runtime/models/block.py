"""A transformer block, for targets and draft heads: attention and MLP with their norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from runtime.layers.attention.base import AttentionSpec
from runtime.layers.attention_layer import Attention, AttentionLayer, Rows
from runtime.layers.dense_sparse_mlp import DenseSparseMlp
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.mlp import GatedMlp, Mlp
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream
from runtime.layers.pass_context import PassContext


@dataclass(frozen=True, slots=True)
class Block:
    """A pre-norm block: `h += attention(attn_norm(h)); h += mlp(mlp_norm(h))`.

    Attributes:
        attn_norm: None for a block whose attention is always fed rows of another origin, such as the first of an EAGLE
            head.
    """

    attention: AttentionLayer[Any]
    mlp: Mlp
    attn_norm: RMSNorm | None
    mlp_norm: RMSNorm

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return self.attention.kernel_launches + self.mlp.kernel_launches

    def gemms(self) -> Iterator[Gemm]:
        """The GEMMs to autotune, in order."""
        first = self.attn_norm or self.mlp_norm
        yield from self.attention.gemms(first, self.mlp_norm)
        yield from self.mlp.gemms(self.mlp_norm, first)

    def forward(
        self,
        stream: Stream,
        context: PassContext,
        next_norm: RMSNorm | None = None,
        rows: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> Stream:
        """The residual stream after the block, perhaps in the same storage.

        Args:
            next_norm: the next block's first norm.
            rows: [T, in] in the model's dtype: what attention reads instead of the normed stream.
            wanted: int64 [N], the tokens whose rows are returned; KV is written for all tokens, and nothing else is computed if N = 0.
        """
        attention, norm = self.attention, self.attn_norm
        if rows is None:
            assert norm is not None, "this block has no input norm: it needs rows"
            qkv = attention.project(stream, norm)
        else:
            qkv = attention.project_rows(rows)
        attended, stream = _attend(attention, qkv, stream, context, wanted)
        if attended is None:
            return stream
        stream = attention.add_output(attended, stream, self.mlp_norm)
        return self.mlp.forward(stream, self.mlp_norm, next_norm)


@dataclass(frozen=True, slots=True)
class SandwichBlock:
    """A block that norms the input and the output of both attention and MLP:
    `h += attn_out_norm(attention(attn_norm(h))); h = (h + mlp_out_norm(mlp(mlp_norm(h)))) * factor`.

    Attributes:
        attn_norm, mlp_norm: None where the input is not normed.
        factor: [1] in the model's dtype; None for 1.
    """

    attention: Attention
    mlp: GatedMlp | DenseSparseMlp
    attn_norm: RMSNorm | None
    attn_out_norm: RMSNorm
    mlp_norm: RMSNorm | None
    mlp_out_norm: RMSNorm
    factor: torch.Tensor | None
    ops: BlockOps

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return self.attention.kernel_launches + self.mlp.kernel_launches + 2

    def gemms(self) -> Iterator[Gemm]:
        """The GEMMs to autotune, in order."""
        yield from self.attention.gemms(self.attn_norm, None)
        yield from self.mlp.gemms(self.mlp_norm, None)

    def forward(
        self, stream: Stream, context: PassContext, next_norm: RMSNorm | None = None, *, wanted: torch.Tensor | None = None
    ) -> Stream:
        """The residual stream after the block, perhaps in the same storage. `next_norm` and `wanted`: as for `Block`."""
        attention, dtype = self.attention, self.attn_out_norm.weight.dtype
        if self.attn_norm is None:
            qkv = attention.project_rows(stream.h.to(dtype), stream.in_prompt)
        else:
            qkv = attention.project(stream, self.attn_norm)
        attended, stream = _attend(attention, qkv, stream, context, wanted)
        if attended is None:
            return stream
        output = attention.output(attended, stream.in_prompt)
        stream = self.ops.add_normed(output, self.attn_out_norm, stream, self.mlp_norm)
        if self.mlp_norm is None:
            assert isinstance(self.mlp, GatedMlp), "only a dense MLP reads rows"
            output = self.mlp.output_of_rows(stream.h.to(dtype), stream.in_prompt)
        else:
            output = self.mlp.output(stream, self.mlp_norm)
        return self.ops.add_normed(output, self.mlp_out_norm, stream, next_norm, self.factor)


def _attend(
    attention: AttentionLayer[Rows], qkv: Rows, stream: Stream, context: PassContext, wanted: torch.Tensor | None
) -> tuple[torch.Tensor | None, Stream]:
    """The attended rows and the stream of the `wanted` tokens. KV is written for all tokens, and the rows are None if none is wanted."""
    if wanted is None:
        return attention.attend(qkv, context), stream
    if not len(wanted):
        attention.write_kv(qkv, context)
        return None, Stream(stream.h[:0], in_prompt=stream.in_prompt)
    return attention.attend(qkv, context)[wanted], Stream(stream.h[wanted], in_prompt=stream.in_prompt)


DecoderBlock = Block | SandwichBlock


def attention_specs(blocks: Iterable[DecoderBlock]) -> tuple[AttentionSpec, ...]:
    """The attention over keys and values of each block that has it, for the KV pool and the backend."""
    specs = (block.attention.attention_spec() for block in blocks)
    return tuple(spec for spec in specs if spec is not None)
