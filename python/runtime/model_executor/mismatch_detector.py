"""Detects that eager drafts differ from those of graphs more often than usual, right or wrong. On the host; no torch.

With correct graphs too the first drafts of a window differ at near-ties, with some weights often and with others never. The usual share of
mismatches is therefore learned. A clearly higher share is a reason to take more samples, but no evidence of a fault.
"""

from __future__ import annotations

import math

FIRST_SHARE, FIRST_PAIRS, MAX_PAIRS = 0.02, 2.0, 200.0
"""Initial usual share, its weight in pairs, and the maximum weight of the past."""
ALLOWANCE = 0.2
"""Nats by which each pair lowers the statistic, so that it falls again even if all pairs mismatch."""
SURPRISING, MAX_SURPRISE = 2.0, 3.0
"""The share is surprising from `SURPRISING` nats on; the statistic is at most `MAX_SURPRISE`."""


class MismatchDetector:
    """Owner of the usual share of mismatches, and of a CUSUM test of it against the share half-way to 1.

    Attributes:
        surprising: whether recent pairs mismatch much more often than usual.
    """

    def __init__(self) -> None:
        self._mismatched, self._pairs = FIRST_SHARE * FIRST_PAIRS, FIRST_PAIRS
        self._surprise, self.surprising = 0.0, False

    def add(self, mismatched: int, pairs: int) -> None:
        """Count the pairs of a sample, `mismatched` of which have different first drafts."""
        usual = self._mismatched / self._pairs
        gain = mismatched * math.log((1 + usual) / (2 * usual)) - (pairs - mismatched) * math.log(2) - pairs * ALLOWANCE
        self._surprise = min(max(self._surprise + gain, 0.0), MAX_SURPRISE)
        self.surprising = self._surprise >= SURPRISING
        keep = min(MAX_PAIRS / (self._pairs + pairs), 1.0)
        self._mismatched, self._pairs = keep * (self._mismatched + mismatched), keep * (self._pairs + pairs)
