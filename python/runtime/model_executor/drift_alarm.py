"""Detects graphs that accept less than eager passes, by a sequential test. On the host; no torch.

Each sample proposes one window twice, through graphs and eagerly, and the target's tokens say which of both drafts is right. Where they
differ in that, sound graphs are right as often as eager passes are, whatever the text and its acceptance: McNemar's test of pairs.
It may be looked at after every sample and still has a bounded rate of false alarms: it is an e-detector (Shin, Ramdas and Rinaldo 2022,
arXiv:2203.03532) over the likelihood ratios of such a coin. One test looks at each position, which shows a fault of that one soonest, and
one at all together: the first draft that only one side has is as often the graphs' as the eager side's, at whatever position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.model_executor.unlike_drafts import UnlikeDrafts
from runtime.worker_info import Drift

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
FALSE_ALARM_ITERATIONS, KINDS = 1e7, 2
"""Iterations in which one false alarm is expected, at the most, by all kinds of samples."""
EAGER_SHARE = np.array([0.6, 0.75, 0.9, 0.98])
"""The faults that the test looks for: the share of eager drafts among those right ones that the other side does not have."""
EAGER_GAIN, GRAPH_GAIN = np.log(2 * EAGER_SHARE), np.log(2 * (1 - EAGER_SHARE))
"""What one right draft of one side alone adds to the logarithm of the likelihood ratio."""
MIN_GAP = 0.02
"""A smaller difference of acceptance is never reported."""
FORGET_PAIRS, CALM_PAIRS = 300, 80
"""Pairs that are right alike after which earlier ones are forgotten, and after which they ask for no more samples: within them a fault
of `MIN_GAP` and one of five points nearly always show.
"""
PROBED = 0.25
"""Suspicion, in nats, where first drafts are surprisingly often unlike: less than that by one right draft of the eager side alone."""
MOST_EVIDENCE = 50.0
"""Evidence in nats above which more changes nothing."""
KEPT = 1e3
"""The detector's most, in limits, so that right drafts of graphs can end an alarm."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Windows that were drafted twice.

    Attributes:
        graph, eager: int64 [n], accepted drafts of each window; beyond the first draft that only one side has right nothing is known.
        unlike: bool [n], whether both sides begin with different drafts, as far as the draft keeps them between iterations.
        depth: drafts of a window.
        verify: whether the eager ones follow an eager verification.
    """

    graph: Int64
    eager: Int64
    unlike: npt.NDArray[np.bool_]
    depth: int
    verify: bool = False

    def counts(self, num_steps: int) -> Int64:
        """int64 [4, K]: by position the pairs in which both sides got there, those in which graphs are right, and the eager side is, and
        those in which the eager side alone is.
        """
        positions = np.arange(num_steps)
        both = (np.minimum(self.graph, self.eager)[:, None] >= positions) & (positions < self.depth)
        graph, eager = (both & (side[:, None] > positions) for side in (self.graph, self.eager))
        return np.stack([side.sum(axis=0) for side in (both, graph, eager, eager & ~graph)])


class DriftAlarm:
    """Compares drafts through graphs with eager ones. Samples in which verification is eager too are compared by themselves: those of the
    draft alone do not show what its graph does.
    """

    def __init__(self, num_steps: int) -> None:
        self._drafts, self._whole = Comparison(num_steps), Comparison(num_steps)

    def count_iteration(self) -> None:
        """An iteration ran, sampled or not."""
        self._drafts.iterations += 1
        self._whole.iterations += 1

    def add(self, pairs: Pairs) -> None:
        """Count the pairs of a sample."""
        (self._whole if pairs.verify else self._drafts).add(pairs)

    def check(self) -> list[Drift]:
        """The positions that drifted."""
        found = self._drafts.drifts()
        return found + [drift for drift in self._whole.drifts() if drift.position not in {one.position for one in found}]

    def suspicion(self, verify: bool) -> float:
        """Evidence of a drift by samples with or without verification, in nats; 0 after an alarm: more samples tell nothing new."""
        return (self._whole if verify else self._drafts).suspicion


class Comparison:
    """Owner of the evidence that samples of one kind give: by position, and last of all positions together.

    Attributes:
        iterations: since the previous sample.
        suspicion: like `DriftAlarm.suspicion`.
    """

    def __init__(self, num_steps: int) -> None:
        tests = num_steps + 1 if num_steps else 0
        self._limit = FALSE_ALARM_ITERATIONS * KINDS * tests
        # The e-detector of each test and fault: without a drift its mean is the iterations so far, however they are sampled.
        self._detector, self._evidence = np.zeros((tests, len(EAGER_SHARE))), np.zeros((tests, len(EAGER_SHARE)))
        self._alike = np.zeros(tests, dtype=np.int64)  # pairs since the last difference
        self._counts = np.zeros((4, num_steps), dtype=np.int64)  # while there is evidence
        self._unlike = UnlikeDrafts()
        self.iterations, self.suspicion = 0, 0.0

    def add(self, pairs: Pairs) -> None:
        """Count the pairs of a sample."""
        counts = pairs.counts(self._counts.shape[1])
        both, graph, eager, eager_alone = counts
        self._count_alone(_with_total(eager_alone), _with_total(graph - (eager - eager_alone)), np.append(both, len(pairs.graph)))
        open_tests = self._evidence.any(axis=1) | self._reported()
        self._counts = np.where(open_tests[:-1] | open_tests[-1:], self._counts + counts, 0)
        self._unlike.add(int(pairs.unlike.sum()), len(pairs.unlike))
        probed = PROBED if self._unlike.surprising else 0.0
        self.suspicion = 0.0 if self._reported().any() else max(_nats(self._evidence), probed)

    def _count_alone(self, eager: Int64, graph: Int64, pairs: Int64) -> None:
        """Right drafts of either side alone and pairs, int64 [tests] each."""
        gain = eager[:, None] * EAGER_GAIN + graph[:, None] * GRAPH_GAIN
        self._detector = np.minimum((self._detector + self.iterations) * np.exp(gain), KEPT * self._limit)
        self._evidence = np.clip(self._evidence + gain, 0.0, MOST_EVIDENCE)
        self._alike = np.where(eager + graph > 0, 0, self._alike + pairs)
        self._detector[self._alike > FORGET_PAIRS] = 0.0
        self._evidence[self._alike > CALM_PAIRS] = 0.0
        self.iterations = 0

    def _reported(self) -> npt.NDArray[np.bool_]:
        return self._detector.mean(axis=1) >= self._limit

    def drifts(self) -> list[Drift]:
        """The positions that drifted; if only all together show it, the one with the most evidence."""
        reported = self._reported()
        if not reported.any():
            return []
        positions = np.flatnonzero(reported[:-1]) if reported[:-1].any() else [int(self._detector[:-1].mean(axis=1).argmax())]
        return [drift for i in positions if (drift := _drift(int(i), *self._counts[:, i].tolist())) is not None]


def _with_total(counts: Int64) -> Int64:
    return np.append(counts, counts.sum())


def _drift(position: int, reached: int, graph: int, eager: int, eager_alone: int) -> Drift | None:
    """The drift of a position by its `Pairs.counts`; None if it is too small."""
    if not eager - graph >= MIN_GAP * reached > 0:
        return None
    graph_alone = graph - (eager - eager_alone)
    return Drift(position, graph / reached, eager / reached, float((graph_alone - eager_alone) / np.sqrt(graph_alone + eager_alone)))


def _nats(evidence: Floats) -> float:
    """Evidence [tests, faults] of the most suspicious test: the mean over faults."""
    return float(np.log(np.exp(evidence).mean(axis=1)).max(initial=0.0))
