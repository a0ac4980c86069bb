"""Bounds the time that the masks of one request take, because all requests of a batch wait for them."""

from __future__ import annotations

from time import perf_counter, thread_time

SLOW = 0.01
"""Seconds by the clock after which the request's masks are metered; a busy machine reaches them too."""
SPARE = 0.5
"""CPU seconds that metered masks may take in all..."""
PER_MASK = 0.01
"""...beyond so many each."""


class MaskMeter:
    """Meters the masks of one request. Reading the clock takes less time than reading a thread's CPU time, so it comes first.

    Attributes:
        exceeded: whether the masks took too long. They stay as they are: ranks of one model must not differ by their speed.
    """

    def __init__(self) -> None:
        self._metered, self._left, self.exceeded = False, SPARE, False

    def start(self) -> float:
        """A mask begins; returns what `stop` needs."""
        return thread_time() if self._metered else perf_counter()

    def stop(self, began: float) -> None:
        """A mask is done."""
        if self._metered:
            self._left -= thread_time() - began - PER_MASK
            self.exceeded = self.exceeded or self._left < 0
        else:
            self._metered = perf_counter() - began > SLOW
