"""Tells acceptance that graphs lose from chance: a sequential test. On the host; no torch.

The test may be looked at after every sample and still has a bounded rate of false alarms: an e-detector (Shin, Ramdas and
Rinaldo 2022, arXiv:2203.03532) over conditional likelihood ratios of 2 x 2 tables. Given how many drafts of a block were
accepted in all, the number among the eager ones is hypergeometric if graphs and eager steps accept alike, whatever the
rate; text that changes the rate of both is no evidence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from runtime.model_executor.acceptance import AcceptanceCounters, compare, total
from runtime.worker_info import Drift

Floats = npt.NDArray[np.float64]
KEPT = 1e3
"""The detector's most, in limits: a drift that ends is forgotten."""
BLOCK_ITERATIONS = 16
"""Iterations through graphs and eager ones of a block, at the least; one more runs between them."""
MAX_GRAPH_ITERATIONS = 32
"""Iterations through graphs of a block, at the most: earlier ones may be of other text."""
FALSE_ALARM_ITERATIONS, KINDS = 1e7, 2
"""Iterations in which one false alarm is expected, at the most, by all kinds of samples."""
LOG_ODDS = np.array([-3.0, -1.2, -0.5, -0.2, 0.2, 0.5, 1.2, 3.0])
"""The differences that the test looks for: log odds of an eager draft's acceptance minus those through graphs."""
GRAPHS_LOSE = LOG_ODDS > 0
PRIOR = np.where(GRAPHS_LOSE, 0.225, 0.025)
"""What each of them counts for: a fault loses acceptance."""
CAUTION = np.where(GRAPHS_LOSE, np.where(LOG_ODDS < 1, 0.8, 0.7), 0.5)
"""Drafts that follow each other in one text go well or badly together, and a text ends in repetitions, which are easy. So evidence
counts by these factors: with them its mean over recorded texts is at most one, by differences, for 1 to 64 requests.
"""
SUSPICION, STRONG = 0.6, 3.5
"""Evidence, in nats, from which more iterations are sampled, and evidence that healthy graphs seldom show."""
MOST_GAIN = 7.5
"""Evidence of a single block, at the most: its iterations through graphs may be of other text."""
MIN_GAP = 0.02
"""A smaller difference of acceptance is never reported."""
FALL, FALL_DEVIATIONS = 0.15, 4.0
"""A fall of acceptance through graphs that asks for samples: at least this much, in this many standard deviations."""
FALL_BLOCKS = 6
"""Blocks that are sampled as under strong evidence after it: text that is harder to draft is told from a drift within them."""


class DriftAlarm:
    """Compares drafts through graphs with eager ones, block by block.

    A block is the eager iterations of one sample, and the last ones through graphs before them. Samples of the draft alone are compared
    apart from those in which verification is eager too: they do not show what its graph does.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._whole, self._drafts = self._kinds = Comparison(num_steps), Comparison(num_steps)
        self._graph = deque[AcceptanceCounters](maxlen=MAX_GRAPH_ITERATIONS)
        self._recent, self._usual = RecentRates(num_steps, 64), RecentRates(num_steps, 1024)

    def add(self, accept_lens: npt.ArrayLike, eager_sample: bool, num_steps: int | None = None, verify: bool = True) -> None:
        """As `count`: int [B], each in 1..num_steps + 1."""
        batch = AcceptanceCounters(self._num_steps)
        batch.add(accept_lens, num_steps)
        self.count(batch, eager_sample, verify)

    def count(self, batch: AcceptanceCounters, eager_sample: bool, verify: bool) -> None:
        """Count one batch. One through graphs after eager ones ends their block.

        `verify`: whether verification was eager in the sample too.
        """
        for kind in self._kinds:
            kind.iterations += 1
        if eager_sample:
            (self._whole if verify else self._drafts).eager.merge(batch)
            return
        for kind in self._kinds:
            if kind.eager.iterations:
                kind.end_block(self._graph)
                self._graph.clear()
        self._graph.append(batch)
        self._recent.add(batch)
        self._usual.add(batch)
        if self._recent.fell_below(self._usual):
            for kind in self._kinds:
                kind.blocks_to_probe = FALL_BLOCKS
            self._usual.copy(self._recent)

    def check(self) -> list[Drift]:
        """The positions that drifted, the block under way included."""
        found = self._whole.drifts(self._graph)
        return found + [drift for drift in self._drafts.drifts(self._graph) if drift.position not in {one.position for one in found}]

    @property
    def suspicion(self) -> float:
        """Evidence of a drift in nats; a recent fall of acceptance through graphs counts as strong. After an alarm more samples
        tell nothing new.
        """
        return self._whole.suspicion

    @property
    def draft_suspicion(self) -> float:
        """The same by samples of the draft alone."""
        return self._drafts.suspicion


class Comparison:
    """Owner of the evidence that samples of one kind give.

    Attributes:
        eager: the block under way.
        iterations: since the block before.
        blocks_to_probe: blocks that are sampled as under strong evidence.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._evidence = np.zeros((num_steps, len(LOG_ODDS)))
        # The e-detector of each position and difference: without a drift its mean is the iterations so far, however they are sampled.
        self._detector, self._limit = np.zeros((num_steps, len(LOG_ODDS))), FALSE_ALARM_ITERATIONS * KINDS * num_steps
        # Counts since the evidence of a position became suspicious, for the report.
        self._counts = [self._counters() for _ in range(num_steps)]
        self.eager, self.iterations, self.blocks_to_probe = AcceptanceCounters(num_steps), 0, 0
        self._latest = 0.0  # evidence as of the last complete block

    def _counters(self) -> dict[bool, AcceptanceCounters]:
        return {eager: AcceptanceCounters(self._num_steps) for eager in (False, True)}

    @property
    def suspicion(self) -> float:
        """Like `DriftAlarm.suspicion`."""
        return max(self._latest, STRONG if self.blocks_to_probe else 0.0)

    def drifts(self, graph: Iterable[AcceptanceCounters]) -> list[Drift]:
        """The positions that drifted; `graph`: iterations through graphs before the block under way."""
        _, detector, counts = self._with_block(graph)
        found = []
        for i in np.flatnonzero(detector @ PRIOR >= self._limit):
            drift = compare(counts[i][False], counts[i][True])
            found += [d for d in drift if d.position == i and abs(d.graph - d.eager) >= MIN_GAP]
        return found

    def end_block(self, graph: Iterable[AcceptanceCounters]) -> None:
        """Add the evidence of the block under way."""
        self._evidence, detector, self._counts = self._with_block(graph)
        self._detector = np.minimum(detector, KEPT * self._limit)
        reported = (detector @ PRIOR >= self._limit).any()
        self._latest = 0.0 if reported else float(_mean_evidence(self._evidence).max(initial=0.0))
        self.eager, self.iterations = AcceptanceCounters(self._num_steps), 0
        self.blocks_to_probe = max(self.blocks_to_probe - 1, 0)

    def _with_block(self, batches: Iterable[AcceptanceCounters]) -> tuple[Floats, Floats, list[dict[bool, AcceptanceCounters]]]:
        """Evidence [K, differences] in nats, the detector of the same shape and counts by position, after the block so far."""
        graph, eager = total(self._num_steps, batches), self.eager
        if not graph.iterations or not eager.iterations:
            return self._evidence, self._detector, self._counts
        gained, counts = np.zeros_like(self._evidence), []
        grown = _mean_evidence(self._evidence) >= SUSPICION
        for i in range(self._num_steps):
            both = self._counters()
            for side, block in ((False, graph), (True, eager)):
                both[side].merge(block)
                if grown[i]:
                    both[side].merge(self._counts[i][side])
            counts.append(both)
            gained[i] = CAUTION * block_evidence(*(int(n[i]) for c in (eager, graph) for n in (c.accepted, c.reached)))
        gained = np.minimum(gained, MOST_GAIN)
        return np.maximum(self._evidence, 0.0) + gained, (self._detector + self.iterations) * np.exp(gained), counts


class RecentRates:
    """Acceptance by position over about the last `span` batches, older ones counting less."""

    def __init__(self, num_steps: int, span: int) -> None:
        self._keep = 1 - 1 / span
        self._batches = 0.0
        self._counts = np.zeros((2, num_steps))  # reached, accepted

    def add(self, batch: AcceptanceCounters) -> None:
        """Count one batch."""
        self._batches = self._batches * self._keep + 1
        self._counts = self._counts * self._keep + batch.counts[1:]

    def copy(self, other: RecentRates) -> None:
        """Remember what `other` does."""
        self._batches, self._counts = other._batches, other._counts

    def fell_below(self, usual: RecentRates) -> bool:
        """Whether a position accepts less than usual, beyond chance. False before `usual` knows more than this one."""
        if usual._batches <= 4 * self._batches:
            return False
        n = self._counts[0]
        # Of a depth that ran long ago, less than one window is remembered.
        before, now = (accepted / np.maximum(reached, 1e-9) for reached, accepted in (usual._counts, self._counts))
        drop = before - now
        if drop.max() < FALL:
            return False
        deviation = np.sqrt(before * (1 - before) / np.maximum(n, 1)) + 1e-9
        return bool(((drop >= FALL) & (drop >= FALL_DEVIATIONS * deviation)).any())


@lru_cache(maxsize=4096)
def block_evidence(eager_accepted: int, eager: int, graph_accepted: int, graph: int) -> Floats:
    """Log likelihood ratios, [differences], of a 2 x 2 table given its margins: each of `LOG_ODDS` against none."""
    total = eager_accepted + graph_accepted
    eager_counts = np.arange(max(0, total - graph), min(eager, total) + 1)
    weights = _log_binomial(eager, eager_counts) + _log_binomial(graph, total - eager_counts)
    tilted = weights + LOG_ODDS[:, None] * eager_counts
    return LOG_ODDS * eager_accepted - (_log_sum(tilted) - _log_sum(weights[None]))


def _log_binomial(n: int, k: npt.NDArray[np.int64]) -> Floats:
    log_factorial = _log_factorials(n.bit_length())
    return log_factorial[n] - log_factorial[k] - log_factorial[n - k]


@cache
def _log_factorials(bits: int) -> Floats:
    """Logarithms of the factorials of 0 to 2 ** bits - 1."""
    return np.concatenate([[0.0], np.log(np.arange(1, 1 << bits)).cumsum()])


def _log_sum(logs: Floats) -> Floats:
    top = logs.max(axis=1)
    return top + np.log(np.exp(logs - top[:, None]).sum(axis=1))


def _mean_evidence(evidence: Floats) -> Floats:
    """The evidence of each position, [K] in nats: the mean over differences."""
    return _log_sum(evidence + np.log(PRIOR))
