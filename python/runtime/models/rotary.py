"""The rotary table, and the scales of queries by position, that a model's config describes."""

from __future__ import annotations

import math

import torch

from runtime.errors import ConfigError
from runtime.layers.rope import Rope
from runtime.models.config import ModelConfig, RopeScaling

POSITION_MARGIN = 128
"""Extra rows of the table, past the longest context: speculation may compute, and then discard, positions there."""


def build_rope(config: ModelConfig, device: torch.device) -> Rope:
    """Cosines, sines and scales of queries of every position that a pass may compute.

    Returns:
        Tables of max_context_len + POSITION_MARGIN positions on `device`.

    Raises:
        ConfigError: the number of longrope factors does not fit the heads.
    """
    # On the host, so that the bits do not depend on the device; a meta device computes nothing.
    place = device if device.type == "meta" else torch.device("cpu")
    positions = torch.arange(config.max_context_len + POSITION_MARGIN, dtype=torch.float32, device=place)
    dim, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
    # float32 angles, as in training: float64 would give angles that the model was not trained with.
    angles = torch.outer(positions, inverse_frequencies(dim, config.rope_theta, scaling, config.max_context_len).to(place))
    magnitude = 1.0 if scaling is None else scaling.magnitude
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * magnitude
    growth = config.query_scaling
    scales = None if growth is None else 1 + growth.beta * torch.log(1 + torch.floor(positions / growth.length))
    return Rope(table.to(device), config.rope_interleaved, None if scales is None else scales.to(device))


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None, max_context_len: int = 0) -> torch.Tensor:
    """Angle per position of each pair of a head, float32 [dim / 2].

    In transformers, `dynamic` and `longrope` depend on the current length of the text, so that cached keys would have to be
    rotated again as it grows. Here they depend on the longest context that is served.

    Args:
        dim: entries of a head that are rotated.
        max_context_len: the longest context that is served.

    Raises:
        ConfigError: the number of longrope factors is not that of the pairs.

    Source: Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; llama3: the Llama 3.1 release; yarn:
    Peng et al. 2023, arXiv:2309.00071; dynamic: its section 3.3; longrope: Ding et al. 2024, arXiv:2402.13753; proportional:
    the Gemma 4 release.
    """
    kind = None if scaling is None else scaling.kind
    if scaling is not None and kind == "dynamic":
        length = max(max_context_len, scaling.original_max_position)
        theta *= (scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)) ** (dim / (dim - 2))
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    freqs = 1.0 / wavelengths
    if scaling is None or kind == "dynamic":
        return freqs
    if kind == "linear":
        return freqs / scaling.factor
    if kind == "llama3":
        return _by_wavelength(freqs, scaling)
    if kind == "yarn":
        keep = 1.0 - _yarn_ramp(dim, theta, scaling)
        return 1.0 / (scaling.factor * wavelengths) * (1.0 - keep) + freqs * keep
    if kind == "longrope":
        long = max_context_len > scaling.original_max_position
        return 1.0 / (_divisors(dim, scaling.long_factors if long else scaling.short_factors) * wavelengths)
    return torch.where(torch.arange(dim // 2) < int(scaling.rotated * dim // 2), freqs / scaling.factor, 0.0)


def _by_wavelength(freqs: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, and interpolate between."""
    rotations = scaling.original_max_position * freqs / (2 * math.pi)
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return freqs * keep + freqs / scaling.factor * (1 - keep)


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """How far each pair's wavelength is stretched, from 0 (many rotations in the original context) to 1."""

    def pair_with(rotations: float) -> float:
        return dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)


def _divisors(dim: int, factors: tuple[float, ...]) -> torch.Tensor:
    if len(factors) != dim // 2:
        raise ConfigError(f"The longrope scaling names {len(factors)} factors; heads with {dim} rotated entries need {dim // 2}.")
    return torch.tensor(factors, dtype=torch.float32)
