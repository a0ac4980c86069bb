"""The gated activations of experts, as parameters of their kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

SILU, CLAMPED_SWIGLU, GELU_TANH = 0, 1, 2
"""Kinds: `silu(gate) * up`; `gate * sigmoid(alpha * gate) * (up + 1)` of clamped values; the first with GELU."""


@dataclass(frozen=True, slots=True)
class GatedAct:
    """The activation of a gate and an up projection.

    Attributes:
        kind: `SILU`, `CLAMPED_SWIGLU` or `GELU_TANH`.
        alpha, limit: of `CLAMPED_SWIGLU`, with the gate clamped to at most `limit` and up to `±limit`.
    """

    kind: int = SILU
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def argument(self) -> GateArgument:
        """The value as a parameter of the CUDA kernels."""
        return GateArgument(self.alpha, self.limit)


class GateArgument(ctypes.Structure):
    """`Gate` in `grouped_parts.cu`."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("alpha", "limit"))
