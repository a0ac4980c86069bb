"""Converts a layer's experts into the arguments of GPU kernels."""

from __future__ import annotations

import torch

from runtime.layers.activation import CLAMP_ALPHA, CLAMP_LIMIT, Activation
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.kernels.expert_pass import ExpertPass
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH, SILU, GatedAct
from runtime.layers.moe.router import Routing

ACTS = {
    Activation.SILU: GatedAct(SILU),
    Activation.GELU_TANH: GatedAct(GELU_TANH),
    Activation.CLAMPED_SWIGLU: GatedAct(CLAMPED_SWIGLU, CLAMP_ALPHA, CLAMP_LIMIT),
}
"""The kernels' activation between the two GEMMs."""


def expert_pass(x: torch.Tensor, experts: Experts, routing: Routing, out: torch.Tensor, pdl: bool) -> ExpertPass:
    """A pass of rows `x` through the experts."""
    gate_up = ExpertWeights(experts.gate_up.weight, experts.gate_up.scale, experts.gate_up_bias)
    down = ExpertWeights(experts.down.weight, experts.down.scale, experts.down_bias)
    return ExpertPass(x, gate_up, down, routing, ACTS[experts.activation], out, experts.first, pdl, experts.shared, experts.total)
