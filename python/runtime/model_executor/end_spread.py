"""Throughput lost because drafting makes requests finish at different times. Runs on the host, without torch.

Without drafts, requests that start together and generate equally many tokens finish in the same iteration. With drafts their acceptance
differs: the last ones run in small batches, and new prompts need separate steps. If requests finish at different times anyway, drafts
change little.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

HALF_SPAN = 1.35
"""Standard deviations in the shortest interval with half of a normal distribution."""
MIN_LEFT = 16
"""Lower bound for the tokens left: up to 8 tokens in flight are not counted, so smaller numbers would be mostly error."""


def share_lost(left: npt.NDArray[np.integer], rate: float) -> float:
    """How much later than the mean the last of n requests finishes because of drafts, as a fraction of the time until then.

    End times are assumed normal. Each iteration adds the variance of one draft, `rate` * (1 - `rate`), to a request's number of tokens.

    Args:
        left: int [n], the maximum number of tokens that each may still generate. The half that finishes closest together counts.
        rate: fraction of drafts that are accepted.
    """
    n, ordered = len(left), np.sort(left)
    half, mean = n // 2, 1 + rate
    spans = ordered[half:] - ordered[: n - half]
    first = int(spans.argmin())
    middle, spread = max(int(ordered[first + half // 2]), MIN_LEFT), float(spans[first]) / HALF_SPAN
    drift = math.sqrt(rate * (1 - rate) * middle / mean)
    return last_of(n) * (math.hypot(spread, drift) - spread) / middle


@cache
def last_of(n: int) -> float:
    """Expected maximum of n independent standard normal numbers.

    Source: Blom 1958, Statistical Estimates and Transformed Beta-Variables, for a normal distribution.
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
