"""Decides when iterations run eagerly for comparison with graphs: rarely, more often under suspicion, within a time limit.

A draft pass has few launches, which a large model's verification hides, so samples of only the draft cost almost nothing there.
Verification runs eagerly in separate samples, which take as long as launching all kernels of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.batch import EagerSample
from runtime.model_executor.drift_alarm import BLOCK_ITERATIONS, STRONG, SUSPICION, DriftAlarm

FEWEST, LONG_BLOCK = 2, 6
"""Up to `FEWEST` requests, blocks of cheap samples have `LONG_BLOCK` iterations, because each shows few drafts."""
EASY_SHARE = 0.002
"""Fraction of the time for samples of one kind while nothing is suspicious."""
RESERVE, EASY_RESERVE, REFILL = 320.0, 85.0, 0.01
"""Eager samples make n iterations longer by the time of at most `RESERVE` + `REFILL` x n replays, for any n, and of
`EASY_RESERVE` + `REFILL` x n while the evidence is below `STRONG`."""
SUSPICIOUS_SHARE = 0.01
"""Fraction of the time that samples may take by the odds of a drift, exp(evidence): healthy graphs rarely look very suspicious."""
LEAST_EXTRA, MOST_EXTRA = 0.05, 16.0
"""Minimum and maximum extra time of an eager iteration, in replays: its first run may compile kernels."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Initial values for samples of one kind.

    Attributes:
        gap: iterations before the first block, and between it and the others of the first `blocks`.
        extra: replays by which an eager iteration takes longer, before any is timed.
        share: their maximum fraction of the time for samples.
    """

    gap: int
    blocks: int
    extra: float
    share: float


WHOLE, DRAFTS = Kind(480, 1, 4.0, 0.4), Kind(20, 2, 0.3, 0.2)


class Samples:
    """Owner of both schedules: of samples with verification, and of samples of the draft alone, which give way to them."""

    def __init__(self) -> None:
        self._whole, self._drafts = SampleSchedule(WHOLE), SampleSchedule(DRAFTS)
        self._prepared = False

    def next(self, live: int, alarm: DriftAlarm) -> EagerSample:
        """Count an iteration of `live` requests."""
        whole = EagerSample(*self._whole.next(live, alarm.suspicion), verify=True)
        drafts = EagerSample(*self._drafts.next(live, alarm.draft_suspicion))
        sample = whole if whole.eager else EagerSample(drafts.taken and self._prepared, drafts.precedes)
        self._prepared = sample.precedes
        return sample

    def observe(self, seconds: float, sample: EagerSample) -> None:
        """An iteration took `seconds`."""
        for schedule, verify in ((self._whole, True), (self._drafts, False)):
            if not sample.eager or sample.verify == verify:
                schedule.observe(seconds, sample.eager)


class SampleSchedule:
    """Chooses the iterations of one kind of sample."""

    def __init__(self, kind: Kind = WHOLE) -> None:
        self._kind, self._share = kind, kind.share
        self._now = self._blocks = 0
        self._length, self._start = 3, kind.gap
        self._budget, self._replay, self._extra = kind.share * RESERVE, 0.0, kind.extra  # in replays, in seconds, in replays

    def next(self, live: int, suspicion: float) -> tuple[bool, bool]:
        """Count an iteration of `live` requests. Returns whether it is eager, and whether the next one is."""
        self._now += 1
        self._budget = min(self._budget + self._share * REFILL, self._share * RESERVE)
        if self._now >= self._start + self._length:
            self._plan(live, suspicion)
        elif suspicion >= SUSPICION and self._start - self._now > BLOCK_ITERATIONS:
            self._start = min(self._start, self._now + self._distance(self._length, suspicion))
        if self._now == self._start:
            self._budget -= self._cost(self._length)
        return self._sampled(self._now), self._sampled(self._now + 1)

    def observe(self, seconds: float, eager: bool) -> None:
        """An iteration took `seconds`; `eager`: it was in the sample, or preceded it."""
        if not eager:
            self._replay += (seconds - self._replay) / (16 if self._replay else 1)
        elif self._replay:
            extra = min(max(seconds / self._replay - 1, LEAST_EXTRA), MOST_EXTRA)
            self._extra += (extra - self._extra) / 4

    def _sampled(self, iteration: int) -> bool:
        return self._start <= iteration < self._start + self._length

    def _longest(self, live: int) -> int:
        """Iterations of a block that shows few drafts and costs little; else 0."""
        return LONG_BLOCK if live <= FEWEST and self._extra < 1 else 0

    def _cost(self, length: int) -> float:
        """Replays by which a block takes longer; verification of the iteration before it runs eagerly too."""
        return (length + 1) * self._extra

    def _distance(self, length: int, suspicion: float) -> int:
        """Iterations until a block of `length` may begin that this much suspicion asks for."""
        share = min(SUSPICIOUS_SHARE * np.exp(suspicion), 1.0)
        return max(BLOCK_ITERATIONS + 1, round(self._cost(length) / share), self._wait(length, suspicion)) - length

    def _wait(self, length: int, suspicion: float) -> int:
        """Iterations until the budget pays for a block."""
        kept = 0.0 if suspicion >= STRONG else self._share * (RESERVE - EASY_RESERVE)
        wanted = min(kept + self._cost(length), self._share * RESERVE)
        return int(np.ceil(max(wanted - self._budget, 0.0) / (self._share * REFILL)))

    def _plan(self, live: int, suspicion: float) -> None:
        """Set the next block, which begins now. Few requests give few drafts, so more of their iterations are eager."""
        if suspicion >= SUSPICION:
            self._length = self._longest(live) or (4 if live <= 16 or self._extra < 1 else 2)
            self._start = self._now + self._distance(self._length, suspicion)
        else:
            self._blocks, self._length = self._blocks + 1, (1 if live > 32 else self._longest(live) or 3)
            rare = max(round(self._cost(self._length) / EASY_SHARE), BLOCK_ITERATIONS + self._length)
            gap = self._kind.gap if self._blocks < self._kind.blocks else rare
            self._start = self._now + max(gap, self._wait(self._length, suspicion))
