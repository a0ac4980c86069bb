"""Decides when an iteration is drafted again eagerly: now and then, more often under suspicion, within a time limit.

A draft's eager passes are short. Verification runs eagerly in separate samples, which take as long as launching all kernels of the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.batch import NO_SAMPLE, EagerSample
from runtime.model_executor.drift_alarm import DriftAlarm

RISE = 6.0
"""The gap between samples shrinks by exp(`RISE` x evidence in nats): one right draft that only the eager side has is half a nat."""
STRONG = 1.5
"""Evidence, in nats, that sound graphs seldom show: below it `EASY_SHARE` of the reserve can be spent."""
EASY_SHARE = 0.4
LEAST_EXTRA, MOST_EXTRA = 0.05, 16.0
"""Minimum and maximum extra time of a sample, in replays: its first run may compile kernels."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How samples of one kind are spread.

    Attributes:
        first: iterations before the first.
        share: fraction of the time for them while nothing is suspicious.
        extra: replays that a sample takes, before any is timed.
        reserve, refill: samples make n iterations longer by the time of at most `reserve` + `refill` x n replays, for any n.
    """

    first: int
    share: float
    extra: float
    reserve: float
    refill: float


WHOLE, DRAFTS = Kind(480, 0.002, 5.0, 130.0, 0.004), Kind(8, 0.005, 0.15, 400.0, 0.01)


class Samples:
    """Owner of both schedules: of samples with verification, and of samples of the draft alone, which give way to them."""

    def __init__(self) -> None:
        self._whole, self._drafts = SampleSchedule(WHOLE), SampleSchedule(DRAFTS)

    def next(self, alarm: DriftAlarm) -> EagerSample:
        """Count an iteration."""
        drafts = self._drafts.next(alarm.suspicion(verify=False))
        if self._whole.next(alarm.suspicion(verify=True)):
            return EagerSample(taken=True, verify=True)
        return EagerSample(taken=True) if drafts else NO_SAMPLE

    def observe(self, seconds: float, sample: EagerSample) -> None:
        """An iteration took `seconds`, which began with `sample`."""
        for schedule, verify in ((self._whole, True), (self._drafts, False)):
            if not sample.taken or sample.verify == verify:
                schedule.observe(seconds, sample.taken)


class SampleSchedule:
    """Chooses the iterations of one kind of sample."""

    def __init__(self, kind: Kind) -> None:
        self._kind, self._wait = kind, kind.extra / kind.share - kind.first  # iterations since the previous sample
        self._budget, self._replay, self._extra = kind.reserve, 0.0, kind.extra  # in replays, in seconds, in replays

    def next(self, suspicion: float) -> bool:
        """Count an iteration. Returns whether it is sampled."""
        self._wait += 1
        self._budget = min(self._budget + self._kind.refill, self._kind.reserve)
        kept = 0.0 if suspicion >= STRONG else (1 - EASY_SHARE) * self._kind.reserve
        if self._wait < self._gap(suspicion) or self._budget - self._extra < kept:
            return False
        self._wait, self._budget = 0, self._budget - self._extra
        return True

    def observe(self, seconds: float, sampled: bool) -> None:
        """An iteration took `seconds`; `sampled`: a sample included."""
        if not sampled:
            self._replay += (seconds - self._replay) / (16 if self._replay else 1)
        elif self._replay:
            extra = min(max(seconds / self._replay - 1, LEAST_EXTRA), MOST_EXTRA)
            self._extra += (extra - self._extra) / 4

    def _gap(self, suspicion: float) -> float:
        """Iterations from a sample to the next."""
        return self._extra / self._kind.share * math.exp(-RISE * suspicion)
