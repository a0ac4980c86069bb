"""A GEMM as a model describes it to the autotuner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from runtime.layers.activation import Activation
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm

GemmOp = Literal["linear", "linear_add", "gate_up", "logits", "candidates", "bounds"]
"""The block operation around a GEMM; "logits" stands for the LM head with and without argmax, "candidates" and "bounds" for its
8-bit copies."""
GemmKey = tuple[GemmOp, str, int, int, int]
"""Operation, scheme, rows and columns of the weight, m bucket."""


COLUMN_MULTIPLE = 16
"""The columns of a weight must be a multiple, or only cuBLAS multiplies by it."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """One GEMM of a model.

    Attributes:
        op: the block operation that runs it.
        linear: the layer that it multiplies by.
        norm: the norm fused with it: the preceding one for "linear" and "gate_up", the next one for "linear_add"; None for a "linear" whose
            rows are not normed.
        activation: the activation of "gate_up".
        q_norm: for latent attention's first projection, and for that of the queries, the norm between them: the first may prepare it for
            the second.
        after_attention: whether it directly follows attention, which triggers its launch early and, for short contexts, leaves the memory
            idle.
    """

    op: GemmOp
    linear: Linear
    norm: RMSNorm | None
    activation: Activation = Activation.SILU
    q_norm: RMSNorm | None = None
    after_attention: bool = False

    def key(self, m_bucket: int) -> GemmKey:
        """The key by which its kernel is chosen."""
        return self.op, self.linear.scheme.name, self.linear.out_features, self.linear.in_features, m_bucket


class PassTimer(Protocol):
    """Times decode passes over some layers of a model.

    Attributes:
        gemms: the GEMMs of these layers.
        most_rows: the largest pass.
    """

    gemms: Sequence[Gemm]
    most_rows: int

    def micros(self, rows: int) -> float:
        """Microseconds of a pass of `rows` requests with one token each, with the present choices."""
        ...


def input_dtype(linear: Linear, norm: RMSNorm | None = None) -> torch.dtype:
    """Dtype of a layer's inputs: the weight's dtype if that has 16 bits, otherwise the adjacent norm's."""
    if linear.is_dense:
        return linear.weight.dtype
    return torch.bfloat16 if norm is None else norm.weight.dtype


def takes_kernels(linear: Linear) -> bool:
    """Whether kernels other than cuBLAS can multiply by a layer's weight."""
    return linear.in_features % COLUMN_MULTIPLE == 0 and linear.scheme.gemm_format is not None
