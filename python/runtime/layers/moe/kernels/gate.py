"""The gated activations in the experts' kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import triton
import triton.language as tl

SILU, CLAMPED_SWIGLU, GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class GatedAct:
    """The activation of a gate and an up projection.

    Attributes:
        kind: `SILU`: `silu(gate) * up`; `GELU_TANH`: the same with GELU; `CLAMPED_SWIGLU`: `gate * sigmoid(alpha * gate) * (up + 1)`, with
            the gate clamped to at most `limit` and up to `±limit`.
    """

    kind: int = SILU.value
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def argument(self) -> GateArgument:
        """The value as a parameter of the CUDA kernels."""
        return GateArgument(self.alpha, self.limit)


class GateArgument(ctypes.Structure):
    """`Gate` in `grouped_parts.cu`."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("alpha", "limit"))


@triton.jit
def apply_gate(gate, up, alpha, limit, KIND: tl.constexpr):
    """The activation of float32 tensors of one shape."""
    if KIND == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    if KIND == GELU_TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * inner)) * up
    return gate / (1.0 + tl.exp(-gate)) * up
