"""Tells acceptance that graphs lose from chance: a sequential test, and when to sample eagerly. On the host; no torch.

The test may be looked at after every sample and still has a bounded rate of false alarms: an e-detector (Shin, Ramdas and
Rinaldo 2022, arXiv:2203.03532) over conditional likelihood ratios of 2 x 2 tables. Given how many drafts of a block were
accepted in all, the number among the eager ones is hypergeometric if graphs and eager steps accept alike, whatever the
rate; text that changes the rate of both is no evidence.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from runtime.model_executor.acceptance import AcceptanceCounters, compare
from runtime.worker_info import Drift

BLOCK_ITERATIONS = 16
"""Iterations through graphs and eager ones of a block, at the least; one more runs between them."""
MAX_GRAPH_ITERATIONS = 32
"""Iterations through graphs of a block, at the most: earlier ones may be of other text."""
FALSE_ALARM_ITERATIONS = 1e7
"""Iterations in which one false alarm is expected, at the most."""
LOG_ODDS = np.array([-3.0, -1.2, -0.5, -0.2, 0.2, 0.5, 1.2, 3.0])
"""The differences that the test looks for: log odds of an eager draft's acceptance minus those through graphs."""
SUSPICION, STRONG = 0.6, 3.5
"""Evidence, in nats, from which more iterations are sampled, and evidence that healthy graphs seldom show."""
FEW_REQUESTS = 4
CAUTION = ((16, 0.5), (1 << 30, 1.0))
"""Drafts that follow each other in one text go well or badly together, which matters where there are few texts. So evidence
counts by a factor: that of the first entry with at least as many requests."""
MIN_GAP = 0.02
"""A smaller difference of acceptance is never reported."""
FIRST_GAP, FIRST_BLOCKS = 60, 2
"""Iterations between the first blocks, and their number. The gap doubles after them; with few requests, whose eager
iterations cost the most beside their replays, it is at its end at once."""
RARE_SHARE = 512
"""In the end one iteration in this many is eager."""
RESERVE, EASY_RESERVE, REFILL = 320.0, 64.0, 0.05
"""Eager samples make n iterations longer by the time of at most `RESERVE` + `REFILL` x n replays, for any n, and of
`EASY_RESERVE` + `REFILL` x n while the evidence is below `STRONG`."""
SUSPICIOUS_SHARE = 0.02
"""Share of the time that samples may take by the odds of a drift, exp(evidence): healthy graphs seldom look very suspicious."""
FIRST_EXTRA, MOST_EXTRA = 4.0, 16.0
"""Replays by which an eager iteration takes longer: before any is timed, and at the most, as its first run may compile kernels."""
FALL, FALL_DEVIATIONS = 0.15, 4.0
"""A fall of acceptance through graphs that asks for samples: at least this much, in this many standard deviations."""
FALL_BLOCKS = 6
"""Blocks that are sampled as under strong evidence after it: text that is harder to draft is told from a drift within them."""


class DriftAlarm:
    """Compares drafts through graphs with eager ones, block by block.

    A block is the eager iterations of one sample, and the last ones through graphs before them.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._limit = np.log(FALSE_ALARM_ITERATIONS / BLOCK_ITERATIONS * max(num_steps, 1))
        self._evidence = np.zeros((num_steps, len(LOG_ODDS)))
        self._graph, self._eager = deque[AcceptanceCounters](maxlen=MAX_GRAPH_ITERATIONS), AcceptanceCounters(num_steps)
        # Counts since the evidence of a position became suspicious, for the report.
        self._counts = [self._counters() for _ in range(num_steps)]
        self._recent, self._usual = RecentRates(num_steps, 64), RecentRates(num_steps, 1024)
        self._blocks_to_probe = 0
        self._latest = 0.0  # evidence as of the last complete block

    def _counters(self) -> dict[bool, AcceptanceCounters]:
        return {eager: AcceptanceCounters(self._num_steps) for eager in (False, True)}

    def add(self, accept_lens: npt.ArrayLike, eager_sample: bool, num_steps: int | None = None) -> None:
        """Count one batch: int [B], each in 1..num_steps + 1. A batch through graphs after eager ones ends their block."""
        if not eager_sample and self._eager.iterations:
            self._end_block()
        batch = AcceptanceCounters(self._num_steps)
        batch.add(accept_lens, num_steps)
        if eager_sample:
            self._eager.merge(batch)
        else:
            self._graph.append(batch)
            self._recent.add(batch)
            self._usual.add(batch)
            if self._recent.fell_below(self._usual):
                self._blocks_to_probe = FALL_BLOCKS
                self._usual.copy(self._recent)

    def check(self) -> list[Drift]:
        """The positions that drifted, the block under way included."""
        if not self._num_steps:
            return []
        evidence, counts = self._with_block()
        found = []
        for i in np.flatnonzero(_mean_evidence(evidence) >= self._limit):
            drift = compare(counts[i][False], counts[i][True])
            found += [d for d in drift if d.position == i and abs(d.graph - d.eager) >= MIN_GAP]
        return found

    @property
    def suspicion(self) -> float:
        """Evidence of a drift in nats; a recent fall of acceptance through graphs counts as strong. After an alarm more samples
        tell nothing new.
        """
        return max(self._latest if self._latest < self._limit else 0.0, STRONG if self._blocks_to_probe else 0.0)

    def _end_block(self) -> None:
        self._evidence, self._counts = self._with_block()
        self._latest = float(_mean_evidence(self._evidence).max(initial=0.0))
        self._graph.clear()
        self._eager = AcceptanceCounters(self._num_steps)
        self._blocks_to_probe = max(self._blocks_to_probe - 1, 0)

    def _with_block(self) -> tuple[npt.NDArray[np.float64], list[dict[bool, AcceptanceCounters]]]:
        """Evidence [K, differences] in nats and counts by position, after the block so far."""
        graph, eager = AcceptanceCounters(self._num_steps), self._eager
        for batch in self._graph:
            graph.merge(batch)
        if not graph.iterations or not eager.iterations:
            return self._evidence, self._counts
        evidence, counts = np.maximum(self._evidence, 0.0), []
        grown = _mean_evidence(self._evidence) >= SUSPICION
        weight = next(factor for most, factor in CAUTION if graph.iterations <= most * len(self._graph))
        for i in range(self._num_steps):
            both = self._counters()
            for side, block in ((False, graph), (True, eager)):
                both[side].merge(block)
                if grown[i]:
                    both[side].merge(self._counts[i][side])
            counts.append(both)
            evidence[i] += weight * block_evidence(*(int(n[i]) for c in (eager, graph) for n in (c.accepted, c.reached)))
        return evidence, counts


class RecentRates:
    """Acceptance by position over about the last `span` batches, older ones counting less."""

    def __init__(self, num_steps: int, span: int) -> None:
        self._keep = 1 - 1 / span
        self._batches = 0.0
        self._counts = np.zeros((2, num_steps))  # reached, accepted

    def add(self, batch: AcceptanceCounters) -> None:
        """Count one batch."""
        self._batches = self._batches * self._keep + 1
        self._counts = self._counts * self._keep + [batch.reached, batch.accepted]

    def copy(self, other: RecentRates) -> None:
        """Remember what `other` does."""
        self._batches, self._counts = other._batches, other._counts

    def fell_below(self, usual: RecentRates) -> bool:
        """Whether a position accepts less than usual, beyond chance. False before `usual` knows more than this one."""
        (n, accepted), (usual_n, usual_accepted) = self._counts, usual._counts
        # Of a depth that ran long ago, less than one window is remembered.
        rate, before = accepted / np.maximum(n, 1e-9), usual_accepted / np.maximum(usual_n, 1e-9)
        deviation = np.sqrt(before * (1 - before) / np.maximum(n, 1)) + 1e-9
        fell = (before - rate >= FALL) & (before - rate >= FALL_DEVIATIONS * deviation)
        return bool(usual._batches > 4 * self._batches and fell.any())


def block_evidence(eager_accepted: int, eager: int, graph_accepted: int, graph: int) -> npt.NDArray[np.float64]:
    """Log likelihood ratios, [differences], of a 2 x 2 table given its margins: each of `LOG_ODDS` against none."""
    total = eager_accepted + graph_accepted
    eager_counts = np.arange(max(0, total - graph), min(eager, total) + 1)
    weights = _log_binomial(eager, eager_counts) + _log_binomial(graph, total - eager_counts)
    tilted = weights + LOG_ODDS[:, None] * eager_counts
    return LOG_ODDS * eager_accepted - (_log_sum(tilted) - _log_sum(weights[None]))


def _log_binomial(n: int, k: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    log_factorial = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
    return log_factorial[n] - log_factorial[k] - log_factorial[n - k]


def _log_sum(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    top = logs.max(axis=1)
    return top + np.log(np.exp(logs - top[:, None]).sum(axis=1))


def _mean_evidence(evidence: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The evidence of each position, [K] in nats: the mean over differences, which is an e-detector too."""
    return _log_sum(evidence) - np.log(evidence.shape[1])


class SampleSchedule:
    """Chooses the iterations that run eagerly: some at first, few later, more under suspicion, within a bound on their time.

    Args:
        adaptive: whether the frequency changes. Not where ranks that read no results must choose alike.
    """

    def __init__(self, adaptive: bool = True) -> None:
        self._adaptive = adaptive
        self._now = self._blocks = 0
        self._length, self._start = (3, FIRST_GAP) if adaptive else (1, RARE_SHARE)
        self._budget, self._replay, self._extra = RESERVE, 0.0, FIRST_EXTRA  # in replays, in seconds, in replays

    def next(self, live: int, suspicion: float) -> tuple[bool, bool]:
        """Count an iteration of `live` requests. Returns whether it is eager, and whether the next one is."""
        self._now += 1
        self._budget = min(self._budget + REFILL, RESERVE)
        if self._now >= self._start + self._length:
            self._plan(live, suspicion)
        elif self._adaptive and suspicion >= SUSPICION and self._start - self._now > BLOCK_ITERATIONS:
            self._start = min(self._start, self._now + self._distance(self._length, suspicion))
        if self._now == self._start:
            self._budget -= self._cost(self._length)
        return self._sampled(self._now), self._sampled(self._now + 1)

    def observe(self, seconds: float, eager: bool) -> None:
        """An iteration took `seconds`; `eager`: it was in the sample, or preceded it."""
        if not eager:
            self._replay += (seconds - self._replay) / (16 if self._replay else 1)
        elif self._replay:
            extra = min(max(seconds / self._replay - 1, 1.0), MOST_EXTRA)
            self._extra += (extra - self._extra) / 8

    def _sampled(self, iteration: int) -> bool:
        return self._start <= iteration < self._start + self._length

    def _cost(self, length: int) -> float:
        """Replays by which a block takes longer; verification of the iteration before it runs eagerly too."""
        return (length + 1) * self._extra

    def _distance(self, length: int, suspicion: float) -> int:
        """Iterations until a block of `length` may begin that this much suspicion asks for."""
        share = min(SUSPICIOUS_SHARE * np.exp(suspicion), 1.0)
        return max(BLOCK_ITERATIONS + 1, round(self._cost(length) / share), self._wait(length, suspicion)) - length

    def _wait(self, length: int, suspicion: float) -> int:
        """Iterations until the budget pays for a block."""
        kept = 0.0 if suspicion >= STRONG else RESERVE - EASY_RESERVE
        return int(np.ceil(max(min(kept + self._cost(length), RESERVE) - self._budget, 0.0) / REFILL))

    def _plan(self, live: int, suspicion: float) -> None:
        """Set the next block, which begins now. Few requests give few drafts, so more of their iterations are eager."""
        if suspicion >= SUSPICION and self._adaptive:
            self._length = 4 if live <= 16 else 2
            self._start = self._now + self._distance(self._length, suspicion)
            return
        self._blocks += 1
        self._length = 1 if live > 32 or not self._adaptive else 3
        rare, later = RARE_SHARE * self._length, self._blocks - FIRST_BLOCKS
        gap = FIRST_GAP if later < 0 else rare if live <= FEW_REQUESTS else min(round(FIRST_GAP * 1.3**later), rare)
        self._start = self._now + (max(gap, self._wait(self._length, suspicion)) if self._adaptive else RARE_SHARE - 1)
