"""Chooses the iterations that are drafted again eagerly: occasionally, and more often with evidence of a drift, within a time limit.

A draft's eager passes are short. Verification runs eagerly in separate samples, which take as long as launching all kernels of the target.
Time is counted in replays, the time of a usual iteration. Samples get a fraction of the running time, and with evidence of a drift also
part of a reserve. That part grows exponentially with the evidence: correct graphs reach n nats by chance with a probability of about
exp(-n), so their samples stay cheap on average. What was used must be saved up again before evidence of the same strength can use it once
more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.batch import NO_SAMPLE, EagerSample
from runtime.model_executor.drift_alarm import DriftAlarm

GROWTH = 1.0
"""The part of the reserve that evidence may use grows as exp(`GROWTH` * nats)."""
EVIDENT, SAMPLE_GAP = 0.4, 4
"""With at least `EVIDENT` nats, slightly less than one pair gives in which only the eager draft is right, every iteration may be sampled.
With less, one in `SAMPLE_GAP`: a sample disturbs the times of three iterations, so one of four still shows the time of its depth.
"""
MIN_EXTRA = 0.05
"""Minimum extra time of a sample."""


@dataclass(frozen=True, slots=True)
class SampleKind:
    """The parameters of one kind of sample. Times are in replays.

    Attributes:
        first: iterations before the first sample.
        share: fraction of the running time for samples without evidence of a drift.
        saved: fraction of the running time for all samples.
        extra: initial estimate of the time that a sample takes.
        max_extra: maximum time that a sample counts as, because the first may load kernels.
        weak: part of the reserve that the weakest evidence may use.
        reserve: the reserve, which the strongest evidence may use.
    """

    first: int
    share: float
    saved: float
    extra: float
    max_extra: float
    weak: float
    reserve: float


DRAFTS = SampleKind(first=8, share=0.002, saved=0.004, extra=0.15, max_extra=4.0, weak=3.0, reserve=400.0)
VERIFY = SampleKind(first=3000, share=0.001, saved=0.0015, extra=5.0, max_extra=16.0, weak=10.0, reserve=400.0)


class SampleSchedules:
    """Owner of both schedules: samples with verification, and samples of the draft alone. If both are due, verification runs too."""

    def __init__(self) -> None:
        self._verify, self._drafts = SampleSchedule(VERIFY), SampleSchedule(DRAFTS)
        self._replay, self._late = 0.0, 0.0  # time of a usual iteration in seconds; extra time of the disturbed ones, in replays

    def next(self, alarm: DriftAlarm, possible: bool = True) -> EagerSample:
        """Count an iteration; `possible`: whether it can be sampled."""
        drafts = self._drafts.next(alarm.suspicion(verify=False), possible)
        if self._verify.next(alarm.suspicion(verify=True), possible):
            return EagerSample(taken=True, verify=True)
        return EagerSample(taken=True) if drafts else NO_SAMPLE

    def observe(self, seconds: float | None, disturbed: bool, after: EagerSample) -> None:
        """Learn from the time of an iteration whose results were read.

        Args:
            seconds: time since the previous results were read; None if it is not comparable with others.
            disturbed: whether a sample changed it.
            after: the sample that ran before the iteration. Its work on host and device changed this time and up to two earlier ones.
        """
        if seconds is None:
            self._late = 0.0
        elif not disturbed:
            self._replay += (seconds - self._replay) / (16 if self._replay else 1)
            self._late = 0.0
        elif self._replay:
            self._late += seconds / self._replay - 1
            if after.taken:
                (self._verify if after.verify else self._drafts).observe(self._late)
                self._late = 0.0


class SampleSchedule:
    """Chooses the iterations of one kind of sample.

    `next` runs on the thread that submits steps and `observe` on the one that reads them; each writes only its own fields.
    """

    def __init__(self, kind: SampleKind) -> None:
        self._kind, self._wait = kind, kind.extra / kind.share - kind.first  # iterations since the previous sample
        self._used = 0.0  # replays used of the reserve
        self._extra = kind.extra
        self._late = self._late_before = 0.0  # total time by which samples took longer than expected

    def next(self, suspicion: float, possible: bool = True) -> bool:
        """Count an iteration; returns whether to sample it."""
        self._wait += 1
        late = self._late
        self._used, self._late_before = max(self._used - self._kind.saved + late - self._late_before, 0.0), late
        if not possible or not self._is_due(suspicion):
            return False
        self._wait, self._used = 0, self._used + self._extra
        return True

    def observe(self, took: float) -> None:
        """Learn the time that a sample took."""
        extra = min(max(took, MIN_EXTRA), self._kind.max_extra)
        self._late += extra - self._extra
        self._extra += (extra - self._extra) / 4

    def _is_due(self, suspicion: float) -> bool:
        kind, used = self._kind, self._used + self._extra
        if self._wait >= self._extra / kind.share:
            return used <= kind.reserve
        if suspicion == 0 or self._wait < (1 if suspicion >= EVIDENT else SAMPLE_GAP):
            return False
        return used <= min(kind.weak * math.exp(GROWTH * suspicion), kind.reserve)
