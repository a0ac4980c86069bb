"""The weight and epsilon of an RMS norm, which block operations compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Weight [hidden] and epsilon. Source: Zhang and Sennrich 2019, arXiv:1910.07467."""

    weight: torch.Tensor
    eps: float
