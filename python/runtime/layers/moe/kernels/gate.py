"""The gated activations in the experts' Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.layers.moe.kernels import gated_act

CLAMPED_SWIGLU, GELU_TANH = tl.constexpr(gated_act.CLAMPED_SWIGLU), tl.constexpr(gated_act.GELU_TANH)


@triton.jit
def apply_gate(gate, up, alpha, limit, KIND: tl.constexpr):
    """The activation of float32 tensors of one shape; arguments as in `GatedAct`."""
    if KIND == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    if KIND == GELU_TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * inner)) * up
    return gate / (1.0 + tl.exp(-gate)) * up
