"""Acceptance while serving: counts windows by how they ran, and compares drafts of graphs with eager drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from runtime.batch import NO_SAMPLE, EagerSample, StepStats
from runtime.model_executor.acceptance import AcceptanceCounters, total
from runtime.model_executor.drift_alarm import DriftAlarm, Pairs
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.sample_schedule import SampleSchedules
from runtime.worker_info import AcceptanceStats

log = logging.getLogger(__name__)


class AcceptanceMonitor:
    """Owner of the acceptance counters. Iterations without drafts are not counted.

    Attributes:
        schedule: chooses the iterations to sample.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._sampling, self._depth = num_steps > 0, 0  # depth of the previous iteration
        self.schedule = SampleSchedules()
        self.reset()

    def reset(self) -> None:
        """Restart counting."""
        K = self._num_steps
        self._graph, self._sample, self._eager = AcceptanceCounters(K), AcceptanceCounters(K), AcceptanceCounters(K)
        self.reset_alarm()

    def reset_alarm(self) -> None:
        """Forget the evidence of a drift."""
        self.alarm, self._warned = DriftAlarm(self._num_steps), set[int]()

    def choose_sample(self, depth: int, possible: bool) -> EagerSample:
        """Count an iteration, and return what runs again eagerly after it.

        Nothing does after an iteration without drafts, because its draft extend may run later; nor after the first iteration at a new
        depth, unless the previous one had no drafts: the depth controller learns the time of a depth from the next iteration, which a
        sample would delay.
        """
        possible, self._depth = possible and self._depth in (depth, 0), depth
        return self.schedule.next(self.alarm, possible) if self._sampling and depth else NO_SAMPLE

    @contextmanager
    def without_sample(self) -> Iterator[None]:
        """Take no samples within: for checks that compare graphs with eager runs themselves."""
        before, self._sampling = self._sampling, False
        yield
        self._sampling = before

    def observe_time(self, iteration: Iteration, graph: bool, seconds: float | None, disturbed: bool) -> None:
        """Pass on the time of an iteration; None if it is not comparable with others.

        Args:
            graph: whether it was verified through a graph.
            disturbed: whether a sample changed its time.
        """
        self.schedule.observe(seconds if iteration.depth and graph else None, disturbed, iteration.delay)

    def add(self, iteration: Iteration, accept_lens: np.ndarray, stats: StepStats, pairs: Pairs | None = None) -> None:
        """Count an iteration whose results were read; `pairs`: its windows that were also drafted eagerly. On the host."""
        if iteration.depth == 0:
            return
        graph = stats.graph and iteration.grammar is None  # drafts with a grammar run eagerly
        (self._graph if graph else self._eager).add(accept_lens, iteration.depth, stats.draft_tokens)
        if not graph:
            return
        self.alarm.count_iteration()
        if pairs is not None:
            reached, _, accepted, _ = pairs.counts(pairs.depth)
            self._sample.count(len(pairs.eager), pairs.depth, reached, accepted)
            self.alarm.add(pairs)
            self._warn_of_drift()

    def counted(self) -> AcceptanceCounters:
        """Acceptance since the start, of graphs and eager runs together."""
        return total(self._num_steps, (self._graph, self._eager))

    def stats(self) -> AcceptanceStats | None:
        """Acceptance since the start, by graphs and eager runs; None for a worker without drafts."""
        if self._num_steps == 0:
            return None
        return AcceptanceStats(self._graph.stats(), self._sample.stats(), self._eager.stats(), self.alarm.check())

    def _warn_of_drift(self) -> None:
        drifts = self.alarm.check()
        new, self._warned = [drift for drift in drifts if drift.position not in self._warned], {drift.position for drift in drifts}
        for drift in new:
            log.warning("acceptance of %s: a graph reads stale inputs; restart with --disable-cuda-graph", drift)
