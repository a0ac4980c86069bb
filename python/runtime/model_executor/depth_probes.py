"""Probes: iterations at a depth that is not the best, because its time or its acceptance may have changed. No torch.

A share of the running time pays for them. Each is charged before it runs what it may lose against the best depth, so that all
probes together lose at most that share and what is granted at the start, as in conservative bandits (Wu et al. 2016,
arXiv:1602.04282).
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.model_executor.depth_option import Option

SHARE = 0.004
"""Fraction of the time that probes may cost."""
DISTANCE, BLIND_DISTANCE = 8, 32
"""Minimum iterations between two probes; the second number holds from depth 0."""
EVIDENCE = 8
"""Windows within `BLIND_DISTANCE` iterations that show acceptance well enough to need no probe."""
STALE, PATIENCE, MOST_STALE = 64, 8, 4096
"""A depth is probed after `STALE` iterations without a measured time. If the current depth promises r times the tokens per second, the
wait is r ** `PATIENCE` times longer: a hopeless depth is tried rarely, but never forgotten. At depth 0 only the shallowest depth is probed,
whose time tells of the others', and after each probe only after twice as many iterations, up to `MOST_STALE`."""
TRIAL = 4
"""Iterations of a probe of a depth that would be the best if its time were known better."""
MOST_SAVED, FEW, LEAST_SAVED = 8, 8, 2
"""Iterations whose time a series of probes may cost after a long pause, and half of that at the start, whose measurement may be wrong. This
holds for up to `FEW` requests. More requests show more windows per probe: less is saved up, but at least `LEAST_SAVED` iterations."""


class DepthProbes:
    """Owner of the time that probes may cost, and of when each depth was timed.

    `mispriced` and `give_back` run on the thread that reads steps, all else on the one that submits them.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self._steps = self._probed_at = self._seen_at = self._seen = 0
        self._timed_at, self._waits = dict.fromkeys(depths, 0), dict.fromkeys(depths, STALE)
        self._last = -1  # depth of the iteration before
        self._left = 0  # further iterations of a probe
        self._saved = self._most_saved = 0.0  # seconds that probes may lose
        self._returned = self._returned_before = 0.0  # seconds, in all, that probes gained
        self._mispriced = self._mispriced_before = 0

    def mispriced(self, seconds: float) -> None:
        """A probe took fewer `seconds` than it was charged: times may be wrong, so other probes are due sooner."""
        self._mispriced += 1
        self._returned += seconds

    def give_back(self, seconds: float) -> None:
        """A probe accepted drafts, which saved `seconds`."""
        self._returned += seconds

    def next(self, options: Sequence[Option], best: Option, live: int, parts: bool, windows: int) -> int:
        """The depth to run: that of `best`, or occasionally one that did not run recently, if enough time was saved for its possible loss.

        Args:
            live: requests of the iteration.
            parts: whether drafts make requests end apart that would end together.
            windows: number of windows whose acceptance is known.
        """
        self.hold(best, live)
        if windows >= self._seen + EVIDENCE:
            self._seen, self._seen_at = windows, self._steps
        if self._mispriced != self._mispriced_before:
            self._mispriced_before, self._waits = self._mispriced, dict.fromkeys(self._waits, STALE)
        return self._ran(self._probe(options, best, parts) if len(options) > 1 else best.depth)

    def hold(self, best: Option, live: int) -> None:
        """An iteration of `live` requests begins. Save a fraction of its time, and what probes gained. If requests finish together they
        gain nothing: the last one finishes no earlier.
        """
        self._steps += 1
        returned, most = self._returned, max(MOST_SAVED * min(FEW / live, 1.0), LEAST_SAVED)
        share = SHARE if self._steps > 1 else most / 2
        self._most_saved = most * best.seconds
        self._saved = min(self._saved + share * best.seconds + returned - self._returned_before, self._most_saved)
        self._returned_before = returned

    def _ran(self, depth: int) -> int:
        if self._last in (depth, 0):
            self._timed_at[depth] = self._steps
        self._last = depth
        return depth

    def _probe(self, options: Sequence[Option], best: Option, parts: bool) -> int:
        """As `next`. At depth 0 the shallowest depth is always worth a probe, even if it may cost more than can be saved up: its
        start-up time may be wrong. From another depth, only the second iteration of a probe shows its time.
        """
        if self._left and self._last in (option.depth for option in options):
            self._left -= 1
            return self._last
        self._left, self._waits[best.depth] = 0, STALE
        # Also before the first probe: nothing was seen yet.
        if self._steps - self._probed_at < (BLIND_DISTANCE if best.depth == 0 and self._probed_at else DISTANCE):
            return best.depth
        shallowest = min((option.depth for option in options if option.depth), default=0)
        candidates = [
            (self._loss(option, best, parts), option.depth)
            for option in options
            if option.depth != best.depth and self._is_due(option, best, shallowest)
        ]
        if not candidates:
            return best.depth
        loss, depth = min(candidates)
        if loss > self._saved and not (best.depth == 0 and depth == shallowest and self._saved == self._most_saved):
            return best.depth
        self._saved -= max(loss, 0.0)
        if best.depth == 0:
            self._waits[depth] = min(2 * self._waits[depth], MOST_STALE)
        tempts = _tempts(next(option for option in options if option.depth == depth), best)
        self._probed_at, self._left = self._steps, TRIAL - 1 if tempts else int(best.depth > 0)
        return depth

    def _is_due(self, option: Option, best: Option, shallowest: int) -> bool:
        """Whether the time of a depth is stale, or it is the shallowest one and no acceptance was seen."""
        waited, wait = self._steps - self._timed_at[option.depth], self._waits[option.depth]
        if best.depth == 0:
            blind = self._steps - self._seen_at >= BLIND_DISTANCE
            return waited >= wait / 2 if _tempts(option, best) else option.depth == shallowest and (blind or waited >= wait)
        return waited >= wait * (best.rate / option.rate) ** PATIENCE

    def _loss(self, option: Option, best: Option, parts: bool) -> float:
        """Seconds that a probe may lose against the best depth. From depth 0 its drafts are not counted before they are accepted, unless
        they tempt. If it makes requests end apart, it costs an iteration more: the prompts that follow them need one more step.
        """
        if best.depth:
            return 2 * (option.seconds - option.tokens / best.rate)
        parting = best.seconds if parts else 0.0
        if _tempts(option, best):
            return parting + TRIAL * (option.seconds * (1 + option.margin + option.error) - option.tokens / best.rate)
        return parting + option.seconds - best.seconds


def _tempts(option: Option, best: Option) -> bool:
    """Whether a depth would be chosen instead of no drafts if its time were as expected."""
    return best.depth == 0 and option.tempting_worth > best.worth
