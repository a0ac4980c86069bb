"""A layer's experts as the GPU's kernels read them."""

from __future__ import annotations

from runtime.layers.activation import CLAMP_ALPHA, CLAMP_LIMIT, Activation
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gate import CLAMPED_SWIGLU, GELU_TANH, SILU, GatedAct

ACTS = {
    Activation.SILU: GatedAct(SILU.value),
    Activation.GELU_TANH: GatedAct(GELU_TANH.value),
    Activation.CLAMPED_SWIGLU: GatedAct(CLAMPED_SWIGLU.value, CLAMP_ALPHA, CLAMP_LIMIT),
}
"""What the kernels compute between the two GEMMs."""


def kernel_weights(experts: Experts) -> tuple[ExpertWeights, ExpertWeights, GatedAct]:
    """Gate and up, down, and the activation between them."""
    gate_up = ExpertWeights(experts.gate_up.weight, experts.gate_up.scale, experts.gate_up_bias)
    return gate_up, ExpertWeights(experts.down.weight, experts.down.scale, experts.down_bias), ACTS[experts.activation]
