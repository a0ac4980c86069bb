"""A depth trial: iterations of real requests cycle through all depths, and their times and acceptance are recorded. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median

import numpy as np

from runtime.model_executor.acceptance import AcceptanceCounters
from runtime.model_executor.depth_controller import DecodeRows, DepthChooser, Observed, Windows
from runtime.model_executor.depth_option import Option

BLOCK, FIRST = 4, 1
"""Iterations at one depth before the next depth, and how many of them are not timed, because they may follow steps without drafts."""
ENOUGH_WINDOWS = 64
"""Number of windows after which acceptance is known well enough to drop slow depths."""
DROP_BELOW = 0.8
"""Depths with less than this fraction of the best depth's tokens per second are dropped in later rounds."""


@dataclass(slots=True)
class Cell:
    """Times of iterations of one batch size at one depth, by round. `size`: the padded number of requests."""

    size: int
    rounds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def times(self) -> list[float]:
        """The times of all rounds."""
        return [seconds for block in self.rounds.values() for seconds in block]


class DepthTrial(DepthChooser):
    """Replaces the depth controller while depths are compared.

    Attributes:
        acceptance: acceptance of all windows.
        cells: times by number of requests and depth.
        rounds: how often all depths ran with the current batch size.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self.acceptance = AcceptanceCounters(max(depths))
        self.cells: dict[tuple[int, int], Cell] = {}
        self.rounds = 0
        self._depths = self._running = sorted(depths)
        self._requests = self._at = self._in_row = 0
        self._round = self._block = 0  # the current round over all batch sizes, and the round of the block being read
        self._last: int | None = None

    def begin(self, requests: int) -> None:
        """Compare depths for `requests` requests from now on; iterations of other sizes are not timed. May be called again for a size."""
        self._requests, self._running, self._round = requests, self._depths, self._round + 1
        self._at = self.rounds = 0

    def tokens(self, depth: int) -> float:
        """Mean tokens that an iteration commits per request, including the bonus token."""
        return 1.0 + float(np.cumprod(self.acceptance.rates()[:depth]).sum())

    def seconds(self, requests: int, depth: int) -> float:
        """Estimated time of an iteration: the depth's share of the times in its rounds, multiplied by a typical time.

        Other load on the machine slows all depths of a round alike, so the share is the median over rounds. Load only adds time, so the
        typical time is the lower quartile.
        """
        cells = {d: cell for (size, d), cell in self.cells.items() if size == requests}
        most = max(len(cell.rounds) for cell in cells.values())
        steady = [cell.rounds for cell in cells.values() if len(cell.rounds) == most]  # depths that were not dropped
        shared = set(cells[depth].rounds).intersection(*steady)
        if not shared:
            return float(np.quantile(cells[depth].times, 0.25))
        scales = {at: geometric_mean(median(rounds[at]) for rounds in steady) for at in set.intersection(*map(set, steady))}
        share = median(median(cells[depth].rounds[at]) / scales[at] for at in shared)
        return share * float(np.quantile(list(scales.values()), 0.25))

    def choose(self, rows: DecodeRows, sizes: Mapping[int, int], passes: Sequence[tuple[int, int]] = (), ragged_depth: int = 0) -> Option:
        """The next depth in the cycle, or the largest available one below it, with full windows."""
        wanted = self._running[self._at // BLOCK % len(self._running)]
        if len(rows.caps) == self._requests:
            self._at += 1
            if self._at == BLOCK * len(self._running):
                self._end_round()
        return Option(max((depth for depth in sizes if depth <= wanted), default=min(sizes)), 0.0, 0.0)

    def observe(self, read: Observed) -> None:
        """Count the accepted tokens, and the time if the previous step ran at the same depth."""
        if read.depth:
            self.observe_windows(read)
        self._in_row = self._in_row + 1 if read.depth == self._last else 1
        self._last = read.depth
        if self._in_row == 1:
            self._block = self._round
        if read.seconds is not None and len(read.accept_lens) == self._requests and self._in_row > FIRST:
            cell = self.cells.setdefault((self._requests, read.depth), Cell(read.size))
            cell.rounds.setdefault(self._block, []).append(read.seconds)

    def observe_windows(self, windows: Windows) -> None:
        """Count the accepted tokens."""
        self.acceptance.add(windows.accept_lens, windows.depth)

    def _end_round(self) -> None:
        self._at, self.rounds, self._round = 0, self.rounds + 1, self._round + 1
        if self.acceptance.iterations < ENOUGH_WINDOWS:
            return
        timed = [depth for depth in self._running if (self._requests, depth) in self.cells]
        rates = {depth: self.tokens(depth) / self.seconds(self._requests, depth) for depth in timed}
        least = DROP_BELOW * max(rates.values(), default=0.0)
        self._running = [depth for depth in self._running if rates.get(depth, least) >= least]
