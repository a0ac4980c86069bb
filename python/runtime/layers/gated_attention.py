"""Grouped-query attention with a gate on its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from runtime.layers.attention.base import AttentionSpec
from runtime.layers.attention_layer import Attention, AttentionLayer
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.pass_context import PassContext


class GatedRows(NamedTuple):
    """The first projections of T tokens: the qkv rows of `Attention`, and the inputs of the gate [T, H * head_dim]."""

    qkv: torch.Tensor
    gate: torch.Tensor


class GatedAttention(AttentionLayer[GatedRows]):
    """`AttentionLayer`: the output of `attention` times the sigmoid of a gate, before the output projection. Owner of the gate's weight.

    Attributes:
        attention: this rank's heads.
        gate_proj: the gate of each of their outputs.
    """

    def __init__(self, attention: Attention, gate_proj: Linear) -> None:
        self.attention, self.gate_proj = attention, gate_proj
        self.o_proj, self.ops, self.kernel_launches = attention.o_proj, attention.ops, attention.kernel_launches + 3

    def attention_spec(self) -> AttentionSpec:
        """Its description for the attention backend."""
        return self.attention.spec

    @property
    def active_parameters(self) -> int:
        """Weights that every token is multiplied by."""
        return self.attention.active_parameters + self.gate_proj.num_parameters

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """Its GEMMs, in order."""
        first, last = self.attention.gemms(norm, next_norm)
        yield from (first, Gemm("linear", self.gate_proj, norm), replace(last, after_attention=False))

    def project(self, stream: Stream, norm: RMSNorm) -> GatedRows:
        """The first projections of the normed stream."""
        return GatedRows(self.attention.project(stream, norm), self.ops.norm_linear(stream, norm, self.gate_proj))

    def project_rows(self, x: torch.Tensor, in_prompt: bool = False) -> GatedRows:
        """The first projections of rows [T, in] in the model's dtype. `in_prompt`: as in `Stream`."""
        return GatedRows(self.attention.project_rows(x, in_prompt), self.ops.linear(x, self.gate_proj, in_prompt))

    def write_kv(self, qkv: GatedRows, context: PassContext) -> None:
        """Write k and v to the pool."""
        self.attention.write_kv(qkv.qkv, context)

    def attend(self, qkv: GatedRows, context: PassContext) -> torch.Tensor:
        """Write k and v to the pool and attend: [T, H * head_dim], times the gate."""
        return self.ops.gate(self.attention.attend(qkv.qkv, context), qkv.gate)
