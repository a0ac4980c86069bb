"""The activation functions of gated MLPs."""

from __future__ import annotations

from enum import Enum

import torch
from torch.nn import functional as F

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
"""CLAMPED_SWIGLU: the gate's factor inside the sigmoid, and the limit of gate and up."""


class Activation(Enum):
    """The function applied to the gate before it is multiplied by the up projection; the value is `hidden_act` in a config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


def gated(activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    """`activation(gate) * up` of rows [T, 2 * I], gate first, then up: [T, I].

    With CLAMPED_SWIGLU both are clamped, and 1 is added to up (gpt-oss).
    """
    gate, up = gate_up.chunk(2, dim=1)
    if activation is Activation.CLAMPED_SWIGLU:
        gate = gate.clamp(max=CLAMP_LIMIT)
        return torch.sigmoid(gate * CLAMP_ALPHA).mul_(gate).mul_(up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0))
    activated = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
