"""Detects graphs that accept less than eager passes, by a sequential test. On the host; no torch.

Each sample proposes one window twice, through graphs and eagerly, and the target's tokens show which of the two drafts is right. Among the
pairs of which exactly one is right, correct graphs are right as often as eager passes, at any acceptance: McNemar's test of pairs. The
test can be evaluated after every sample with a bounded rate of false alarms, because it is an e-detector (Shin, Ramdas and Rinaldo 2022,
arXiv:2203.03532) over the likelihood ratios of a fair coin. There is one test for each position, which finds a fault of that position
soonest, and one for all positions together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.model_executor.mismatch_detector import MismatchDetector
from runtime.worker_info import Drift

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
FALSE_ALARM_ITERATIONS, KINDS = 1e7, 2
"""At most one false alarm is expected in this many iterations, and the number of kinds of samples that share it."""
EAGER_SHARE = np.array([0.6, 0.75, 0.9, 0.98])
"""The alternatives of the test: the fraction of pairs with exactly one right draft in which that is the eager one. 0.5 without a fault."""
EAGER_GAIN, GRAPH_GAIN = np.log(2 * EAGER_SHARE), np.log(2 * (1 - EAGER_SHARE))
"""What a pair in which only the eager or only the graph's draft is right adds to the logarithm of the likelihood ratio."""
MIN_GAP = 0.02
"""A smaller difference of acceptance is never reported."""
FORGET_PAIRS, CALM_PAIRS = 300, 80
"""After `FORGET_PAIRS` pairs without a difference earlier pairs are forgotten; after `CALM_PAIRS` they ask for no more samples. Within
these numbers, faults of `MIN_GAP` and of 0.05 nearly always show.
"""
MISMATCH_SUSPICION = 0.25
"""Suspicion, in nats, if first drafts mismatch surprisingly often: less than that of one pair in which only the eager draft is right."""
MAX_EVIDENCE = 50.0
"""Maximum evidence, in nats."""
KEPT = 1e3
"""Maximum of the detector, in multiples of its limit, so that right drafts of graphs can end an alarm."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Windows that were drafted twice.

    Attributes:
        graph, eager: int64 [n], accepted drafts of each window; nothing is known beyond the first draft that is right on only one side.
        mismatched: bool [n], whether the first drafts differ, if the draft keeps them between iterations.
        depth: drafts of a window.
        verify: whether verification was eager too.
    """

    graph: Int64
    eager: Int64
    mismatched: npt.NDArray[np.bool_]
    depth: int
    verify: bool = False

    def counts(self, num_steps: int) -> Int64:
        """int64 [4, K]: by position the pairs in which both sides reached it, in which the graph's draft is right, in which the eager draft
        is right, and in which only the eager draft is right.
        """
        positions = np.arange(num_steps)
        both = (np.minimum(self.graph, self.eager)[:, None] >= positions) & (positions < self.depth)
        graph, eager = (both & (side[:, None] > positions) for side in (self.graph, self.eager))
        return np.stack([side.sum(axis=0) for side in (both, graph, eager, eager & ~graph)])


class DriftAlarm:
    """Compares drafts of graphs with eager drafts. Samples with eager verification are counted separately: samples of the draft alone do
    not show a fault of the verify graph.
    """

    def __init__(self, num_steps: int) -> None:
        self._drafts, self._verify = Comparison(num_steps), Comparison(num_steps)

    def count_iteration(self) -> None:
        """Count an iteration, sampled or not."""
        self._drafts.iterations += 1
        self._verify.iterations += 1

    def add(self, pairs: Pairs) -> None:
        """Count the pairs of a sample."""
        (self._verify if pairs.verify else self._drafts).add(pairs)

    def check(self) -> list[Drift]:
        """The positions that drifted."""
        found = self._drafts.drifts()
        return found + [drift for drift in self._verify.drifts() if drift.position not in {one.position for one in found}]

    def suspicion(self, verify: bool) -> float:
        """Evidence of a drift, in nats, from samples with or without eager verification; 0 after an alarm, when more samples are
        useless.
        """
        return (self._verify if verify else self._drafts).suspicion


class Comparison:
    """Owner of the evidence from samples of one kind: one test per position, and a last one for all positions together.

    Attributes:
        iterations: iterations since the previous sample.
        suspicion: like `DriftAlarm.suspicion`.
    """

    def __init__(self, num_steps: int) -> None:
        tests = num_steps + 1 if num_steps else 0
        self._limit = FALSE_ALARM_ITERATIONS * KINDS * tests
        # The e-detector of each test and alternative: without a drift its mean is the number of iterations so far, for any sampling.
        self._detector, self._evidence = np.zeros((tests, len(EAGER_SHARE))), np.zeros((tests, len(EAGER_SHARE)))
        self._alike = np.zeros(tests, dtype=np.int64)  # pairs since the last difference
        self._counts = np.zeros((4, num_steps), dtype=np.int64)  # while there is evidence
        self._mismatched = MismatchDetector()
        self.iterations, self.suspicion = 0, 0.0

    def add(self, pairs: Pairs) -> None:
        """Count the pairs of a sample."""
        counts = pairs.counts(self._counts.shape[1])
        both, graph, eager, eager_alone = counts
        self._count_alone(_with_total(eager_alone), _with_total(graph - (eager - eager_alone)), np.append(both, len(pairs.graph)))
        open_tests = self._evidence.any(axis=1) | self._reported()
        self._counts = np.where(open_tests[:-1] | open_tests[-1:], self._counts + counts, 0)
        self._mismatched.add(int(pairs.mismatched.sum()), len(pairs.mismatched))
        mismatch = MISMATCH_SUSPICION if self._mismatched.surprising else 0.0
        self.suspicion = 0.0 if self._reported().any() else max(_nats(self._evidence), mismatch)

    def _count_alone(self, eager: Int64, graph: Int64, pairs: Int64) -> None:
        """Count pairs: those in which only the eager draft is right, only the graph's is, and all. int64 [tests] each."""
        gain = eager[:, None] * EAGER_GAIN + graph[:, None] * GRAPH_GAIN
        self._detector = np.minimum((self._detector + self.iterations) * np.exp(gain), KEPT * self._limit)
        self._evidence = np.clip(self._evidence + gain, 0.0, MAX_EVIDENCE)
        self._alike = np.where(eager + graph > 0, 0, self._alike + pairs)
        self._detector[self._alike > FORGET_PAIRS] = 0.0
        self._evidence[self._alike > CALM_PAIRS] = 0.0
        self.iterations = 0

    def _reported(self) -> npt.NDArray[np.bool_]:
        return self._detector.mean(axis=1) >= self._limit

    def drifts(self) -> list[Drift]:
        """The positions that drifted; if only the test of all positions shows it, the position with the most evidence."""
        reported = self._reported()
        if not reported.any():
            return []
        positions = np.flatnonzero(reported[:-1]) if reported[:-1].any() else [int(self._detector[:-1].mean(axis=1).argmax())]
        return [drift for i in positions if (drift := _drift(int(i), *self._counts[:, i].tolist())) is not None]


def _with_total(counts: Int64) -> Int64:
    return np.append(counts, counts.sum())


def _drift(position: int, reached: int, graph: int, eager: int, eager_alone: int) -> Drift | None:
    """The drift of a position, from its `Pairs.counts`; None if it is too small."""
    if not eager - graph >= MIN_GAP * reached > 0:
        return None
    graph_alone = graph - (eager - eager_alone)
    return Drift(position, graph / reached, eager / reached, float((graph_alone - eager_alone) / np.sqrt(graph_alone + eager_alone)))


def _nats(evidence: Floats) -> float:
    """Evidence of the most suspicious test, averaged over the alternatives. `evidence`: [tests, alternatives]."""
    return float(np.log(np.exp(evidence).mean(axis=1)).max(initial=0.0))
