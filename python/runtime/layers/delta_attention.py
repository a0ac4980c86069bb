"""Linear attention with the gated delta rule (Gated DeltaNet)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from runtime.layers.attention_layer import AttentionLayer
from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream
from runtime.layers.pass_context import PassContext
from runtime.mem_cache.state_pool import StateSpec


class DeltaRows(NamedTuple):
    """The first projections of T tokens, in the model's dtype.

    Attributes:
        qkvz: [T, C + H * value_dim], queries, keys and values before the convolution, then the inputs of the output's gate.
        gates: [T, 2 * H], the inputs of each head's rate, then of its decay.
    """

    qkvz: torch.Tensor
    gates: torch.Tensor


class DeltaAttention(AttentionLayer[DeltaRows]):
    """`AttentionLayer`: the gated delta rule over the recurrent states of one layer, or this rank's heads of it. Owner of its weights.

    Attributes:
        index: of the layer in the model's state pool.
        heads: how its projections become heads.
        out_norm: the norm of each head's output, over value_dim columns, before the gate.
    """

    kernel_launches = 8

    def __init__(
        self, index: int, heads: DeltaHeads, qkvz_proj: Linear, gate_proj: Linear, out_norm: RMSNorm, o_proj: Linear, ops: BlockOps
    ) -> None:
        self.index, self.heads, self.out_norm, self.o_proj, self.ops = index, heads, out_norm, o_proj, ops
        self._projections = qkvz_proj, gate_proj

    def state_spec(self) -> StateSpec:
        """Its recurrent state per request."""
        h = self.heads
        return StateSpec(h.num_value_heads, h.key_dim, h.value_dim, h.channels, h.conv_width, h.conv_weight.dtype)

    @property
    def active_parameters(self) -> int:
        """Weights that every token is multiplied by."""
        return sum(linear.num_parameters for linear in (*self._projections, self.o_proj))

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """Its GEMMs, in order."""
        for projection in self._projections:
            yield Gemm("linear", projection, norm)
        yield Gemm("linear_add", self.o_proj, next_norm)

    def project(self, stream: Stream, norm: RMSNorm) -> DeltaRows:
        """The first projections of the normed stream."""
        return DeltaRows(*(self.ops.norm_linear(stream, norm, projection) for projection in self._projections))

    def project_rows(self, x: torch.Tensor, in_prompt: bool = False) -> DeltaRows:
        """The first projections of rows [T, in] in the model's dtype. `in_prompt`: as in `Stream`."""
        return DeltaRows(*(self.ops.linear(x, projection, in_prompt) for projection in self._projections))

    def write_kv(self, qkv: DeltaRows, context: PassContext) -> None:
        """Apply or store the tokens in the recurrent states."""
        self._outputs(qkv, context)

    def attend(self, qkv: DeltaRows, context: PassContext) -> torch.Tensor:
        """Apply or store the tokens in the recurrent states: their gated outputs, [T, H * value_dim]."""
        return self.ops.gated_norm(self._outputs(qkv, context), qkv.qkvz[:, self.heads.channels :], self.out_norm)

    def _outputs(self, qkv: DeltaRows, context: PassContext) -> torch.Tensor:
        assert context.states is not None, "the model has a state pool"
        rows = qkv.qkvz[:, : self.heads.channels]
        return self.ops.delta_rule(rows, qkv.gates, self.heads, self.index, context.states, context.batch)
