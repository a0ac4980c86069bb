"""A depth that an iteration could run at, and the choice of the best one. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.batch import Int32

HYSTERESIS = 0.012
"""Another depth with drafts is used if it promises this fraction more tokens per second than the current one."""


class Option(NamedTuple):
    """A depth that an iteration could run at: tokens that it is expected to commit, and its expected time.

    Attributes:
        widths: int32 [size], tokens of each window where they differ; None for full ones.
        margin: fraction by which it must be better than other options.
        error: fraction by which its time may be longer, on top of that.
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
    def worth(self) -> float:
        """Tokens per second of the whole server, up to a factor."""
        return self.rate / (1 + self.margin + self.error)

    @property
    def tempting_worth(self) -> float:
        """`worth` if its time is as expected."""
        return self.rate / (1 + self.margin)


def best_option(options: Sequence[Option], current: int | None) -> Option:
    """The option that is worth the most; the current depth, if there is one, unless another is clearly better, or no drafts are better at
    all.
    """
    best = max(options, key=lambda option: option.worth)
    held = next((option for option in options if option.depth == current), best)
    return best if best.depth == 0 or best.worth > held.worth * (1 + HYSTERESIS) else held
