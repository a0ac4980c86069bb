"""Probes: iterations at a depth other than the best known one, because its time or acceptance may have changed. No torch.

A fraction of the running time is saved up for them. Before a probe runs, the most that it may lose against the best depth is subtracted, so
all probes together lose at most that fraction and an initial amount, as in conservative bandits (Wu et al. 2016, arXiv:1602.04282).
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.model_executor.depth_option import Option

SHARE = 0.004
"""Fraction of the time that probes may cost."""
DISTANCE, BLIND_DISTANCE = 8, 32
"""Minimum iterations between two probes; the second number applies at depth 0."""
EVIDENCE = 8
"""If at least this many windows showed acceptance within `BLIND_DISTANCE` iterations, no probe is needed for it."""
STALE, PATIENCE, MAX_STALE = 64, 8, 4096
"""A depth is probed after `STALE` iterations without a measured time. If the current depth has r times its expected rate, the wait is
r ** `PATIENCE` times longer, so a slow depth is probed rarely, but not never. At depth 0 the shallowest depth is probed, because its time
also informs about deeper ones, and depths that would be the best if their expected time were exact; the wait doubles with each probe, up to
`MAX_STALE`."""
PROBE_ITERATIONS = 4
"""Iterations of a probe of a depth that would be the best if its expected time were exact."""
MAX_SAVED, FEW, MIN_SAVED = 8, 8, 2
"""Maximum time that can be saved up for probes, in iterations, with up to `FEW` requests; half of it is available at the start, because the
start-up measurement may be wrong. With more requests a probe shows more windows, so less is saved up, but at least `MIN_SAVED`."""


class DepthProbes:
    """Owner of the time that probes may cost, and of when each depth was timed.

    `overcharged` and `refund` run on the thread that reads steps, all other methods on the one that submits them.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self._steps = self._probed_at = self._seen_at = self._seen = 0
        self._timed_at, self._waits = dict.fromkeys(depths, 0), dict.fromkeys(depths, STALE)
        self._last = -1  # depth of the previous iteration
        self._left = 0  # remaining iterations of a probe
        self._saved = self._max_saved = 0.0  # seconds that probes may lose
        self._gained = self._gained_before = 0.0  # total seconds that probes gained
        self._overcharged = self._overcharged_before = 0

    def overcharged(self, seconds: float) -> None:
        """Refund a probe that took fewer `seconds` than it was charged. Other times may be wrong too, so other probes are due sooner."""
        self._overcharged += 1
        self._gained += seconds

    def refund(self, seconds: float) -> None:
        """Refund the `seconds` that the accepted drafts of a probe saved."""
        self._gained += seconds

    def next(self, options: Sequence[Option], best: Option, live: int, spreads_ends: bool, windows: int) -> int:
        """The depth to run: that of `best`, or occasionally one that did not run recently, if enough time was saved up for its possible
        loss.

        Args:
            live: requests of the iteration.
            spreads_ends: whether drafts make requests finish at different times that would finish together.
            windows: number of windows whose acceptance is known.
        """
        self.accrue(best, live)
        if windows >= self._seen + EVIDENCE:
            self._seen, self._seen_at = windows, self._steps
        if self._overcharged != self._overcharged_before:
            self._overcharged_before, self._waits = self._overcharged, dict.fromkeys(self._waits, STALE)
        depth = self._probe(options, best, spreads_ends) if len(options) > 1 else best.depth
        if self._last in (depth, 0):
            self._timed_at[depth] = self._steps
        self._last = depth
        return depth

    def accrue(self, best: Option, live: int) -> None:
        """Save up a fraction of the time of an iteration of `live` requests, and the time that probes gained."""
        self._steps += 1
        gained, most = self._gained, max(MAX_SAVED * min(FEW / live, 1.0), MIN_SAVED)
        share = SHARE if self._steps > 1 else most / 2
        self._max_saved = most * best.seconds
        self._saved = min(self._saved + share * best.seconds + gained - self._gained_before, self._max_saved)
        self._gained_before = gained

    def _probe(self, options: Sequence[Option], best: Option, spreads_ends: bool) -> int:
        """As `next`. At depth 0 the shallowest depth is probed even if it may cost more than can ever be saved up, because its start-up
        time may be wrong. At another depth, only the second iteration of a probe shows its time.
        """
        if self._left and self._last in (option.depth for option in options):
            self._left -= 1
            return self._last
        self._left, self._waits[best.depth] = 0, STALE
        # Before the first probe the short distance applies, because nothing is known yet.
        if self._steps - self._probed_at < (BLIND_DISTANCE if best.depth == 0 and self._probed_at else DISTANCE):
            return best.depth
        shallowest = min((option.depth for option in options if option.depth), default=0)
        candidates = [
            (self._loss(option, best, spreads_ends), option.depth)
            for option in options
            if option.depth != best.depth and self._is_due(option, best, shallowest)
        ]
        if not candidates:
            return best.depth
        loss, depth = min(candidates)
        if loss > self._saved and not (best.depth == 0 and depth == shallowest and self._saved == self._max_saved):
            return best.depth
        self._saved -= max(loss, 0.0)
        if best.depth == 0:
            self._waits[depth] = min(2 * self._waits[depth], MAX_STALE)
        promising = _may_be_best(next(option for option in options if option.depth == depth), best)
        self._probed_at, self._left = self._steps, PROBE_ITERATIONS - 1 if promising else int(best.depth > 0)
        return depth

    def _is_due(self, option: Option, best: Option, shallowest: int) -> bool:
        """Whether the time of a depth is stale, or it is the shallowest one and acceptance was not observed recently."""
        waited, wait = self._steps - self._timed_at[option.depth], self._waits[option.depth]
        if best.depth == 0:
            blind = self._steps - self._seen_at >= BLIND_DISTANCE
            return waited >= wait / 2 if _may_be_best(option, best) else option.depth == shallowest and (blind or waited >= wait)
        return waited >= wait * (best.net_rate / option.net_rate) ** PATIENCE

    def _loss(self, option: Option, best: Option, spreads_ends: bool) -> float:
        """Seconds that a probe may lose against the best depth. At depth 0 accepted drafts are not counted in advance, unless the option
        may be the best. A probe that makes requests finish at different times costs one iteration more, because the next prompts need
        another step.
        """
        if best.depth:
            return 2 * option.tokens * (1 / option.net_rate - 1 / best.net_rate)
        spread_cost = best.seconds if spreads_ends else 0.0
        if _may_be_best(option, best):
            return spread_cost + PROBE_ITERATIONS * (option.seconds * (1 + option.margin + option.error) - option.tokens / best.rate)
        return spread_cost + option.seconds - best.seconds


def _may_be_best(option: Option, best: Option) -> bool:
    """Whether a depth would be chosen instead of no drafts if its expected time were exact."""
    return best.depth == 0 and option.net_rate > best.value
