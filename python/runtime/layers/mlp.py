"""The MLP of a block: its interface, and the dense forms, with and without a gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from runtime.layers.activation import Activation, gated
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream


class Mlp(Protocol):
    """The interface of a block's MLP, dense or sparse.

    Attributes:
        kernel_launches: approximate number per eager pass, including the preceding norm.
    """

    kernel_launches: int

    @property
    def active_parameters(self) -> int:
        """Number of weights used for each token."""
        ...

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """Its GEMMs to autotune, in order, between these norms."""
        ...

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        """`stream + mlp(norm(stream))`, possibly in the same storage; `next_norm` reads it next."""
        ...


class GatedMlp:
    """The dense `Mlp`: `down(activation(gate(x)) * up(x))`. Owner of its weights."""

    kernel_launches = 4

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, ops: BlockOps, activation: Activation = Activation.SILU) -> None:
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._ops, self._activation = ops, activation

    @property
    def active_parameters(self) -> int:
        """The number of all its weights."""
        return self.gate_up_proj.num_parameters + self.down_proj.num_parameters

    def gemms(self, norm: RMSNorm | None, next_norm: RMSNorm | None) -> Iterator[Gemm]:
        """Gate and up, then down, which is not added to the stream if `next_norm` is None. `norm`: None for `output_of_rows`."""
        yield Gemm("linear", self.gate_up_proj, None) if norm is None else Gemm("gate_up", self.gate_up_proj, norm, self._activation)
        yield Gemm("linear", self.down_proj, None) if next_norm is None else Gemm("linear_add", self.down_proj, next_norm)

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        """`stream + mlp(norm(stream))`, possibly in the same storage."""
        gated = self._ops.norm_gate_up(stream, norm, self.gate_up_proj, self._activation)
        return self._ops.linear_add(self.down_proj.own_columns(gated), self.down_proj, stream, next_norm)

    def output(self, stream: Stream, norm: RMSNorm) -> torch.Tensor:
        """`mlp(norm(stream))`, [T, hidden] in the model's dtype."""
        gated = self._ops.norm_gate_up(stream, norm, self.gate_up_proj, self._activation)
        return self.down_proj.reduce(self._ops.linear(self.down_proj.own_columns(gated), self.down_proj, stream.in_prompt))

    def output_of_rows(self, x: torch.Tensor, in_prompt: bool) -> torch.Tensor:
        """`mlp(x)` of rows [T, hidden] in the model's dtype, in that dtype. `in_prompt`: as in `Stream`."""
        rows = gated(self._activation, self._ops.linear(x, self.gate_up_proj, in_prompt))
        return self.down_proj.reduce(self._ops.linear(self.down_proj.own_columns(rows), self.down_proj, in_prompt))


class SquaredReluMlp:
    """A dense `Mlp` without a gate: `down(relu(up(x)) ** 2)`. Owner of its weights."""

    kernel_launches = 5

    def __init__(self, up_proj: Linear, down_proj: Linear, ops: BlockOps) -> None:
        self.up_proj, self.down_proj, self._ops = up_proj, down_proj, ops

    @property
    def active_parameters(self) -> int:
        """The number of all its weights."""
        return self.up_proj.num_parameters + self.down_proj.num_parameters

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """Up, then down."""
        yield Gemm("linear", self.up_proj, norm)
        yield Gemm("linear_add", self.down_proj, next_norm)

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        """`stream + mlp(norm(stream))`, possibly in the same storage."""
        rows = self._ops.norm_linear(stream, norm, self.up_proj).relu_().square_()
        return self._ops.linear_add(self.down_proj.own_columns(rows), self.down_proj, stream, next_norm)
