"""Tells whether eager drafts are unlike those of graphs more often than usual, right or wrong. On the host; no torch.

In sound graphs too the first drafts of a window differ at near-ties, with some weights often and with others never. So what is usual is
learned, and only a share clearly above it is a surprise: it is a reason to look closer, not evidence of a fault.
"""

from __future__ import annotations

import math

FIRST_SHARE, FIRST_PAIRS, MOST_PAIRS = 0.02, 2.0, 200.0
"""The share that is usual before any pair, the pairs that it counts as, and those that are remembered."""
ALLOWANCE = 0.2
"""What each pair takes off the surprise, in nats, so that it ends even if all pairs are unlike."""
SURPRISING, MOST_SURPRISE = 2.0, 3.0
"""Nats from which the share is surprising, and the most."""


class UnlikeDrafts:
    """Owner of the usual share, and of a CUSUM that tells it from one half-way to 1.

    Attributes:
        surprising: whether recent pairs are unlike much more often than usual.
    """

    def __init__(self) -> None:
        self._unlike, self._pairs = FIRST_SHARE * FIRST_PAIRS, FIRST_PAIRS
        self._surprise, self.surprising = 0.0, False

    def add(self, unlike: int, pairs: int) -> None:
        """Count the pairs of a sample, `unlike` of which begin with different drafts."""
        usual = self._unlike / self._pairs
        gain = unlike * math.log((1 + usual) / (2 * usual)) - (pairs - unlike) * math.log(2) - pairs * ALLOWANCE
        self._surprise = min(max(self._surprise + gain, 0.0), MOST_SURPRISE)
        self.surprising = self._surprise >= SURPRISING
        keep = min(MOST_PAIRS / (self._pairs + pairs), 1.0)
        self._unlike, self._pairs = keep * (self._unlike + unlike), keep * (self._pairs + pairs)
