"""The rotary table that a model's config describes."""

from __future__ import annotations

import math

import torch

from runtime.layers.rope import Rope
from runtime.models.config import ModelConfig, RopeScaling

POSITION_MARGIN = 128
"""Rows of the table past the longest context: speculation writes, and discards, this far beyond the end."""


def build_rope(config: ModelConfig, device: torch.device) -> Rope:
    """Cosines and sines of every position that the model may reach.

    Returns:
        A table float32 [max_context_len + POSITION_MARGIN, head_dim] on `device`.
    """
    positions = torch.arange(config.max_context_len + POSITION_MARGIN, dtype=torch.float32)
    # float32 angles, as in training: more exact angles would be different angles.
    angles = torch.outer(positions, inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
    return Rope(torch.cat((angles.cos(), angles.sin()), dim=1).to(device))


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Angle per position of each pair of a head, float32 [head_dim / 2].

    Source: Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; llama3: the Llama 3.1 release.
    """
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    return _by_wavelength(freqs, scaling)


def _by_wavelength(freqs: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, and interpolate between."""
    rotations = scaling.original_max_position * freqs / (2 * math.pi)
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return freqs * keep + freqs / scaling.factor * (1 - keep)
