"""A depth that an iteration could run at, and the choice of the best one. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.batch import Int32

HYSTERESIS = 0.012
"""The depth changes to another one with drafts if this fraction more tokens per second is expected from it."""


class Option(NamedTuple):
    """A depth at which an iteration could run.

    Attributes:
        tokens: expected tokens that all its requests commit.
        seconds: expected time.
        widths: int32 [size], tokens of each window if they differ; None for full windows.
        margin: fraction of time lost because its drafts make requests finish at different times.
        error: relative error of its expected time.
    """

    depth: int
    tokens: float
    seconds: float
    widths: Int32 | None = None
    margin: float = 0.0
    error: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def net_rate(self) -> float:
        """The rate, lowered by the margin."""
        return self.rate / (1 + self.margin)

    @property
    def value(self) -> float:
        """The rate by which options are compared: lowered by margin and error."""
        return self.rate / (1 + self.margin + self.error)


def best_option(options: Sequence[Option], current: int | None) -> Option:
    """The option with the highest value; but the current depth is kept unless another is better by `HYSTERESIS` or no drafts are better."""
    best = max(options, key=lambda option: option.value)
    held = next((option for option in options if option.depth == current), best)
    return best if best.depth == 0 or best.value > held.value * (1 + HYSTERESIS) else held
