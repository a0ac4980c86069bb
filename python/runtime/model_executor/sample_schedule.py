"""Decides when an iteration is drafted again eagerly: now and then, more often under suspicion, within a time limit.

A draft's eager passes are short. Verification runs eagerly in separate samples, which take as long as launching all kernels of the target.

Time is counted in replays. A fraction of the running time pays for samples, and a reserve is lent to them. How much of the reserve may be
used grows with the evidence of a drift: sound graphs reach n nats by chance with a probability of about exp(-n), so that their samples stay
cheap on average. What was used for a suspicion that proved wrong is saved again before another one as weak can use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.batch import NO_SAMPLE, EagerSample
from runtime.model_executor.drift_alarm import DriftAlarm

GROWTH = 1.0
"""What suspicion may use of the reserve grows as exp(`GROWTH` x nats)."""
EVIDENT, PROBE_GAP = 0.4, 4
"""Nats from which every iteration may be sampled, a little below those of one right draft of the eager side alone, and iterations from a
sample to the next with fewer: a sample disturbs the times of three, so that one of four shows the time of its depth.
"""
LEAST_EXTRA = 0.05
"""Minimum extra time of a sample."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How samples of one kind are spread. Times are in replays.

    Attributes:
        first: iterations before the first.
        share: fraction of the time for them while nothing is suspicious.
        saved: fraction of the time for all of them.
        extra: time that a sample takes, before any is timed.
        most_extra: time that one counts as at most: the first may load kernels.
        weak: what the weakest suspicion may use of the reserve.
        reserve: what the strongest may use.
    """

    first: int
    share: float
    saved: float
    extra: float
    most_extra: float
    weak: float
    reserve: float


DRAFTS = Kind(first=8, share=0.002, saved=0.004, extra=0.15, most_extra=4.0, weak=3.0, reserve=400.0)
WHOLE = Kind(first=3000, share=0.001, saved=0.0015, extra=5.0, most_extra=16.0, weak=10.0, reserve=400.0)


class Samples:
    """Owner of both schedules: of samples with verification, and of samples of the draft alone, which give way to them."""

    def __init__(self) -> None:
        self._whole, self._drafts = SampleSchedule(WHOLE), SampleSchedule(DRAFTS)
        self._replay, self._late = 0.0, 0.0  # time of a usual iteration in seconds; how much longer disturbed ones took, in replays

    def next(self, alarm: DriftAlarm, possible: bool = True) -> EagerSample:
        """Count an iteration; `possible`: whether it can be sampled."""
        drafts = self._drafts.next(alarm.suspicion(verify=False), possible)
        if self._whole.next(alarm.suspicion(verify=True), possible):
            return EagerSample(taken=True, verify=True)
        return EagerSample(taken=True) if drafts else NO_SAMPLE

    def observe(self, seconds: float | None, disturbed: bool, after: EagerSample) -> None:
        """An iteration was read.

        Args:
            seconds: since the one before was read; None if that is not the time of usual iterations.
            disturbed: whether a sample changed it.
            after: the sample that ran before it: its work on the host and on the device changed this time and those of up to two before.
        """
        if seconds is None:
            self._late = 0.0
        elif not disturbed:
            self._replay += (seconds - self._replay) / (16 if self._replay else 1)
            self._late = 0.0
        elif self._replay:
            self._late += seconds / self._replay - 1
            if after.taken:
                (self._whole if after.verify else self._drafts).observe(self._late)
                self._late = 0.0


class SampleSchedule:
    """Chooses the iterations of one kind of sample.

    `next` runs on the thread that submits steps and `observe` on the one that reads them; each writes only its own fields.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind, self._wait = kind, kind.extra / kind.share - kind.first  # iterations since the previous sample
        self._used = 0.0  # of the reserve
        self._extra = kind.extra
        self._late = self._late_before = 0.0  # by how much all samples took longer than was expected

    def next(self, suspicion: float, possible: bool = True) -> bool:
        """Count an iteration. Returns whether it is sampled."""
        self._wait += 1
        late = self._late
        self._used, self._late_before = max(self._used - self._kind.saved + late - self._late_before, 0.0), late
        if not possible or not self._is_due(suspicion):
            return False
        self._wait, self._used = 0, self._used + self._extra
        return True

    def observe(self, took: float) -> None:
        """What a sample took."""
        extra = min(max(took, LEAST_EXTRA), self._kind.most_extra)
        self._late += extra - self._extra
        self._extra += (extra - self._extra) / 4

    def _is_due(self, suspicion: float) -> bool:
        kind, used = self._kind, self._used + self._extra
        if self._wait >= self._extra / kind.share:
            return used <= kind.reserve
        if suspicion == 0 or self._wait < (1 if suspicion >= EVIDENT else PROBE_GAP):
            return False
        return used <= min(kind.weak * math.exp(GROWTH * suspicion), kind.reserve)
