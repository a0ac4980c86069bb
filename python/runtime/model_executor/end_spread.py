"""Throughput lost because drafting makes requests finish at different times. Runs on the host, without torch.

Without drafts, requests that start together and generate equally many tokens finish in the same iteration. With drafts their acceptance
differs: the last ones run in small batches, and new prompts need separate steps. If requests finish at different times anyway, drafts
change little.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HALF_SPAN = 1.35
"""Standard deviations in the shortest interval with half of a normal distribution."""
MIN_LEFT = 16
"""Lower bound for the tokens left: up to 8 tokens in flight are not counted, so smaller numbers would be mostly error."""


class EndSpread(NamedTuple):
    """How far apart n requests would finish without drafts.

    Attributes:
        last: standard deviations by which the last one finishes later than the mean.
        left: tokens left to generate.
        spread: standard deviation of that.
    """

    last: float
    left: int
    spread: float

    @classmethod
    def of(cls, left: npt.NDArray[np.integer]) -> EndSpread:
        """`left`: int [n], the maximum number of tokens that each may still generate. The half that finishes closest together counts."""
        n, ordered = len(left), np.sort(left)
        half = n // 2
        spans = ordered[half:] - ordered[: n - half]
        first = int(spans.argmin())
        return cls(last_of(n), max(int(ordered[first + half // 2]), MIN_LEFT), float(spans[first]) / HALF_SPAN)

    def share_lost(self, mean: float, variance: float) -> float:
        """How much later than the mean the last request finishes because of drafts, as a fraction of the time until then.

        End times are assumed normal. Each iteration adds the variance of one window to a request's number of tokens.

        Args:
            mean: tokens that a window commits.
            variance: of that.
        """
        return self.last * (math.hypot(self.spread, math.sqrt(variance * self.left / mean)) - self.spread) / self.left


@cache
def last_of(n: int) -> float:
    """Expected maximum of n independent standard normal numbers.

    Source: Blom 1958, Statistical Estimates and Transformed Beta-Variables, for a normal distribution.
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
