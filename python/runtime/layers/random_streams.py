"""Random numbers keyed by (seed, position, stream).

A request draws the same numbers in any batch, and also after a retraction.
"""

from __future__ import annotations

import enum

import torch


class RandomStream(enum.IntEnum):
    """Independent random streams of one request; one position may draw from each."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    SYNTHETIC = 4


STREAM_STEP = 0x9E3779B97F4A7C15
POSITION_STEP = 0xD1B54A32D192ED03
"""Increments of the key of a random number per stream and per position: odd constants without a pattern in their bits."""


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Uniform numbers in [0, 1 - 2^-24], float32, shape of the broadcast of int64 `seeds` and `positions`.

    Two rounds of the splitmix64 finaliser (Steele et al. 2014) over seed, position and stream.
    """
    x = _mix(seeds + signed(STREAM_STEP * (stream + 1)))
    x = _mix(x + positions.to(torch.int64) * signed(POSITION_STEP))
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) * (1.0 / (1 << 24))


def signed(constant: int) -> int:
    """The int64 with the low 64 bits of `constant`."""
    constant &= (1 << 64) - 1
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))
