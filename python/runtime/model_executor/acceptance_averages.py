"""Averages of acceptance by draft position, one for each class of requests. No torch.

`add` runs on the thread that reads results, all other methods also on the one that submits steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Self

import numpy as np
import numpy.typing as npt

from runtime.batch import Flags

Counts = tuple[float, float]
COPIED, GREEDY, CLASSES = 1, 2, 4
"""The class of a request is a number: `GREEDY` for a greedy one, plus `COPIED` while it copies its prompt. There are `CLASSES`."""
FIRST_RATE = 0.6
"""Initial estimate of the acceptance of the first draft."""
PRIOR = 4.0
"""Weight, in drafts, of the previous position's rate in the estimate for a position."""
OTHER_TEXT = 16.0
"""Weight, in drafts, of the rates of a class with other text in the estimate for a class."""
MEASURED = 64
"""Weight, in windows, of acceptance that was measured before the start."""
SHORT, LONG = 16, 512
"""Length of the two acceptance averages, in windows."""
MIN_KEEP_SHORT, MIN_KEEP_LONG = 0.5, 1 - 1 / 16
"""Minimum weight of the past in an iteration with many windows, for both averages."""
SHIFT, SHIFT_DEVIATIONS = 0.1, 3.5
"""Acceptance has changed if the averages differ by `SHIFT` and by this many standard deviations."""


class AcceptanceAverages:
    """Acceptance by position as exponential averages: a long average, or a short one while it differs from the long one.

    In plain Python numbers, because a call of numpy takes longer than one position.

    Attributes:
        windows: number of windows counted.
    """

    def __init__(self, max_depth: int, measured: Sequence[float] = ()) -> None:
        """`measured`: conditional acceptance of the first positions, which counts as `MEASURED` windows."""
        self._max_depth = max_depth
        reached = [MEASURED * share for share in accumulate(measured[:max_depth], mul, initial=1.0)]
        unknown = [(0.0, 0.0)] * max_depth  # reached, accepted
        self._short, self._long = unknown, [*pairwise(reached), *unknown][:max_depth]
        self.windows = 0

    @property
    def known(self) -> bool:
        """Whether any window was counted or measured before the start."""
        return self._long[0][0] > 0

    def add(self, counts: Sequence[int], depth: int) -> None:
        """Count windows of one depth, at least 1: `counts[n]` of them committed n tokens, 1..depth + 1."""
        at_least = list(accumulate(counts[depth + 1 : 0 : -1]))[::-1]
        if not at_least[0]:
            return
        self.windows += at_least[0]
        new = [*pairwise(at_least), *[(0, 0)] * (self._max_depth - depth)]
        self._short = self._added(self._short, new, depth, max(1 - at_least[0] / SHORT, MIN_KEEP_SHORT))
        long = self._added(self._long, new, depth, max(1 - at_least[0] / LONG, MIN_KEEP_LONG))
        self._long = self._short if self._shifted(long[0]) else long

    def rates(self, other: Self | None = None) -> list[float]:
        """Conditional acceptance of each position; a rarely reached position uses the rate of the previous one.

        Args:
            other: averages of similar requests. As far as few windows were counted here, their rates are used.
        """
        theirs, rate, own, weight = [0.0] * self._max_depth, FIRST_RATE, 1.0, PRIOR
        long = self._long  # `add` replaces it
        if other is not None and other.known:
            theirs, weight = other.rates(), OTHER_TEXT
            rate, own = theirs[0], long[0][0] / (long[0][0] + weight)
        found = list[float]()
        for (reached, accepted), usual in zip(long, theirs, strict=True):
            rate = (accepted + weight * (own * rate + (1 - own) * usual)) / (reached + weight)
            found.append(rate)
        return found

    @staticmethod
    def _added(old: Sequence[Counts], new: Sequence[Counts], depth: int, keep: float) -> list[Counts]:
        """The new average: the past has weight `keep`; positions that were not drafted decay more slowly."""
        keeps = [keep] * depth + [1 - (1 - keep) / 4] * (len(old) - depth)
        return [(m * keep + n, a * keep + b) for (m, a), (n, b), keep in zip(old, new, keeps, strict=True)]

    def _shifted(self, first: Counts) -> bool:
        (reached, accepted), (usual_reached, usual_accepted) = self._short[0], first
        if min(reached, usual_reached) < 1:
            return False
        rate, usual = accepted / reached, (usual_accepted + 1) / (usual_reached + 2)
        return abs(rate - usual) > max(SHIFT, SHIFT_DEVIATIONS * (usual * (1 - usual) / reached) ** 0.5)


class ClassAverages:
    """Acceptance averages by class of request: greedy or sampled, and new text or text copied from the prompt.

    While few windows of a class were counted, it leans on the averages of the other text of greedy, or of sampled, requests.
    """

    def __init__(self, max_depth: int, measured: Sequence[float] = ()) -> None:
        """`measured`: as for `AcceptanceAverages`, over all text. Copied text uses it only until windows of it are counted."""
        self._averages = [AcceptanceAverages(max_depth, measured if not number & COPIED else ()) for number in range(CLASSES)]

    def add(self, number: int, counts: Sequence[int], depth: int) -> None:
        """As `AcceptanceAverages.add`, for one class."""
        self._averages[number].add(counts, depth)

    def windows(self, number: int) -> int:
        """Number of windows of a class that were counted."""
        return self._averages[number].windows

    def rates(self, number: int) -> list[float]:
        """Conditional acceptance of each position."""
        return self._averages[number].rates(self._averages[number ^ COPIED])


def reach(rates: Sequence[float]) -> list[float]:
    """The probability that a window accepts at least k drafts, for k = 1..K. `rates`: conditional acceptance of each position."""
    return list(accumulate(rates, mul))


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens that a window commits, including the bonus token, by depth 0..K."""
    return list(accumulate(reach(rates), initial=1.0))


def class_numbers(greedy: Flags, copied: Flags) -> npt.NDArray[np.intp]:
    """The class of each request, [n]. `copied`: empty if all text is new."""
    numbers = greedy * np.intp(GREEDY)
    return numbers + copied if len(copied) else numbers
