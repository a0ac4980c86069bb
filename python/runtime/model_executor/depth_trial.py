"""A trial of depths: iterations of real requests run at all depths in turn, and their times and acceptance are kept. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from runtime.model_executor.acceptance import AcceptanceCounters
from runtime.model_executor.depth_controller import DecodeRows, Observed, Windows
from runtime.model_executor.depth_option import Option
from runtime.worker_info import DepthInfo

BLOCK, FIRST = 4, 1
"""Iterations at one depth before the next, and how many of them are not timed: the first may follow steps without drafts."""
ENOUGH_WINDOWS = 64
"""From this many windows on, acceptance is known well enough to drop slow depths."""
HOPELESS = 0.8
"""Depths with less than this fraction of the best depth's tokens per second are dropped in later rounds."""


@dataclass(slots=True)
class Cell:
    """Times of iterations of one batch size at one depth. `size`: its requests, padding included."""

    size: int
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time of an iteration, as the lower quartile: other load on the machine only adds time."""
        return float(np.quantile(self.times, 0.25))


class DepthTrial:
    """Takes the place of the depth controller while depths are compared.

    Attributes:
        acceptance: of all windows.
        cells: by requests and depth.
        rounds: how often all depths ran with the present batch size.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self.acceptance = AcceptanceCounters(max(depths))
        self.cells: dict[tuple[int, int], Cell] = {}
        self.rounds = 0
        self._depths = self._running = sorted(depths)
        self._requests = self._at = self._in_row = 0
        self._last: int | None = None

    def begin(self, requests: int) -> None:
        """From now on compare depths for `requests` requests; iterations of fewer or more are not timed."""
        self._requests, self._running = requests, self._depths
        self._at = self.rounds = 0

    def tokens(self, depth: int) -> float:
        """Tokens that an iteration commits per request, bonus included."""
        return 1.0 + float(np.cumprod(self.acceptance.rates()[:depth]).sum())

    def choose(self, rows: DecodeRows, sizes: Mapping[int, int]) -> int:
        """The depth whose turn it is, or the largest below it that can run."""
        wanted = self._running[self._at // BLOCK % len(self._running)]
        if len(rows.caps) == self._requests:
            self._at += 1
            if self._at == BLOCK * len(self._running):
                self._end_round()
        return max((depth for depth in sizes if depth <= wanted), default=min(sizes))

    def decide(self, rows: DecodeRows, sizes: Mapping[int, int], passes: Sequence[tuple[int, int]], ragged_depth: int) -> Option:
        """The same, with full windows."""
        return Option(self.choose(rows, sizes), 0.0, 0.0)

    def observe(self, read: Observed) -> None:
        """Count the accepted tokens, and the time if the previous step ran at the same depth."""
        if read.depth:
            self.acceptance.add(read.accept_lens, read.depth)
        self._in_row = self._in_row + 1 if read.depth == self._last else 1
        self._last = read.depth
        if read.seconds is not None and len(read.accept_lens) == self._requests and self._in_row > FIRST:
            self.cells.setdefault((self._requests, read.depth), Cell(read.size)).times.append(read.seconds)

    def observe_windows(self, windows: Windows) -> None:
        """Count the accepted tokens."""
        self.acceptance.add(windows.accept_lens, windows.depth)

    def observe_guesses(self, greedy: npt.NDArray[np.bool_], hits: npt.NDArray[np.bool_]) -> None:
        """Nothing: windows with drafts show acceptance."""

    def correct(self, spread: float) -> None:
        """Nothing: times are measured with the experts that are read."""

    def info(self) -> DepthInfo | None:
        """Nothing: it chooses nothing."""
        return None

    def _end_round(self) -> None:
        self._at, self.rounds = 0, self.rounds + 1
        if self.acceptance.iterations < ENOUGH_WINDOWS:
            return
        cells = {depth: cell for depth in self._running if (cell := self.cells.get((self._requests, depth))) is not None}
        rates = {depth: self.tokens(depth) / cell.seconds for depth, cell in cells.items()}
        least = HOPELESS * max(rates.values(), default=0.0)
        self._running = [depth for depth in self._running if rates.get(depth, least) >= least]
