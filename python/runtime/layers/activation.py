"""The activation functions of gated MLPs."""

from __future__ import annotations

from enum import Enum

import torch
from torch.nn import functional as F


class Activation(Enum):
    """What is applied to the gate before it is multiplied by the up projection; the value is `hidden_act` in a
    config.json.
    """

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


def gated(activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    """`activation(gate) * up` of rows [T, 2 * I] that hold the gate, then up: [T, I]."""
    gate, up = gate_up.chunk(2, dim=1)
    activated = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
