"""A block whose attention and MLP have a norm before them and another one before their output is added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.layers.attention.layer import Attention
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream
from runtime.layers.pass_context import PassContext


class BranchMlp(Protocol):
    """An MLP whose output is not added to the stream as it is. `GatedMlp` is one."""

    @property
    def kernel_launches(self) -> int:
        """Of an eager pass, about, the norm before it included."""
        ...

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied by."""
        ...

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm | None) -> Iterator[Gemm]:
        """Its GEMMs that are to be autotuned, in order; `next_norm` is None."""
        ...

    def output(self, stream: Stream, norm: RMSNorm) -> torch.Tensor:
        """`mlp(norm(stream))`, [T, hidden] in the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class SandwichBlock:
    """`h += attn_out_norm(attention(attn_norm(h))); h = (h + mlp_out_norm(mlp(mlp_norm(h)))) * factor`.

    Attributes:
        factor: [1] in the model's dtype.
    """

    attention: Attention
    mlp: BranchMlp
    attn_norm: RMSNorm
    attn_out_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp_out_norm: RMSNorm
    factor: torch.Tensor
    ops: BlockOps

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied by."""
        return self.attention.active_parameters + self.mlp.active_parameters

    @property
    def kernel_launches(self) -> int:
        """Of an eager pass, about."""
        return self.attention.kernel_launches + self.mlp.kernel_launches + 2

    def gemms(self) -> Iterator[Gemm]:
        """Its GEMMs that are to be autotuned, in order."""
        yield from self.attention.gemms(self.attn_norm, None)
        yield from self.mlp.gemms(self.mlp_norm, None)

    def forward(self, stream: Stream, context: PassContext, next_norm: RMSNorm | None = None) -> Stream:
        """The stream through the block, perhaps in the same storage. `next_norm`: of the block after this one."""
        attended = self.attention.attend(self.attention.project(stream, self.attn_norm), context)
        output = self.attention.output(attended, stream.in_prompt)
        stream = self.ops.add_normed(output, self.attn_out_norm, stream, self.mlp_norm)
        return self.ops.add_normed(self.mlp.output(stream, self.mlp_norm), self.mlp_out_norm, stream, next_norm, self.factor)
