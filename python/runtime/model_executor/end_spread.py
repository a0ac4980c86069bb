"""What one draft for each request loses because requests that would end together end apart. On the host; no torch.

Without drafts, requests that start together and write as many tokens end in one iteration. With drafts each accepts others, and the last
ones run in small batches while prompts that follow need steps of their own. Where requests end apart anyway, drafts change little.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

HALF_SPAN = 1.35
"""Standard deviations in the shortest span that holds half of a normal distribution."""
LEAST_LEFT = 16
"""What a request still writes is known less the drafts in flight, up to 8 tokens: a smaller number would be mostly that error."""


def share_lost(left: npt.NDArray[np.integer], rate: float) -> float:
    """How much later than the mean the last of n requests ends, as a share of the time until then; without what it ends later anyway.

    Ends are taken as normal. Each iteration adds the variance of one draft, `rate` * (1 - `rate`), to what a request has written.

    Args:
        left: int [n], the most tokens that each may still write. The half of them that end closest together counts.
        rate: share of drafts that are accepted.
    """
    n, ordered = len(left), np.sort(left)
    half, mean = n // 2, 1 + rate
    spans = ordered[half:] - ordered[: n - half]
    first = int(spans.argmin())
    middle, spread = max(int(ordered[first + half // 2]), LEAST_LEFT), float(spans[first]) / HALF_SPAN
    drift = math.sqrt(rate * (1 - rate) * middle / mean)
    return last_of(n) * (math.hypot(spread, drift) - spread) / middle


@cache
def last_of(n: int) -> float:
    """Standard deviations by which the last of n comes after their mean, as expected.

    Source: Blom 1958, Statistical Estimates and Transformed Beta-Variables, for a normal distribution.
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
