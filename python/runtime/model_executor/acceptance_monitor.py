"""Live acceptance: counted by how verification ran, and an eager sample that graphs are compared with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from runtime.batch import NO_SAMPLE, EagerSample, StepStats
from runtime.model_executor.acceptance import AcceptanceCounters, total
from runtime.model_executor.drift_alarm import DriftAlarm
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.sample_schedule import Samples
from runtime.worker_info import AcceptanceStats

log = logging.getLogger(__name__)


class AcceptanceMonitor:
    """Owner of the acceptance counters. Iterations without drafts are not counted.

    In iterations of the eager sample, drafts run eagerly; so does draft extend of the previous iteration, because it makes their
    first drafts, and in some of them verification, because the draft reads its features.

    Attributes:
        schedule: chooses the sample.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._sampling = num_steps > 0
        self.schedule = Samples()
        self.reset()

    def reset(self) -> None:
        """Restart counting."""
        K = self._num_steps
        self._graph, self._sample, self._eager = AcceptanceCounters(K), AcceptanceCounters(K), AcceptanceCounters(K)
        self.reset_alarm()

    def reset_alarm(self) -> None:
        """Forget the evidence of a drift."""
        self.alarm = DriftAlarm(self._num_steps)

    def next_iteration(self, live: int, depth: int) -> EagerSample:
        """Count an iteration of `live` requests. Returns which of its parts may run eagerly.

        An iteration without drafts is in no sample, and runs eagerly before none: the draft follows it within the sample.
        """
        return self.schedule.next(live, self.alarm) if self._sampling and depth else NO_SAMPLE

    @contextmanager
    def without_sample(self) -> Iterator[None]:
        """No iteration is in the sample meanwhile: for checks that compare graphs with eager runs themselves."""
        before, self._sampling = self._sampling, False
        yield
        self._sampling = before

    def observe_time(self, iteration: Iteration, graph: bool, seconds: float) -> None:
        """An iteration of decode rows alone took `seconds`; `graph`: it was verified through a graph."""
        if iteration.depth and (iteration.sample.eager or graph):
            self.schedule.observe(seconds, iteration.sample)

    def add(self, iteration: Iteration, accept_lens: np.ndarray, stats: StepStats) -> None:
        """Count an iteration that was read. On the host."""
        if iteration.depth == 0:
            return
        graph = stats.graph and iteration.grammar is None  # a grammar's drafts run eagerly
        counters = self._sample if iteration.sample.taken else self._graph if graph else self._eager
        batch = AcceptanceCounters(self._num_steps)
        batch.add(accept_lens, iteration.depth, stats.draft_tokens)
        counters.merge(batch)
        if iteration.sample.taken or graph:
            self.alarm.count(batch, iteration.sample.taken, iteration.sample.verify)
        if iteration.sample.taken:
            self._warn_of_drift()

    def counted(self) -> AcceptanceCounters:
        """Acceptance since the start, however it ran."""
        return total(self._num_steps, (self._graph, self._sample, self._eager))

    def stats(self) -> AcceptanceStats | None:
        """Acceptance since the start by how verification ran; None for a worker without drafts."""
        if self._num_steps == 0:
            return None
        return AcceptanceStats(self._graph.stats(), self._sample.stats(), self._eager.stats(), self.alarm.check())

    def _warn_of_drift(self) -> None:
        for drift in self.alarm.check():
            log.warning(
                "acceptance of draft %d is %.3f through graphs and %.3f eager (z = %.1f): a graph reads stale inputs; "
                "restart with --disable-cuda-graph",
                drift.position + 1,
                drift.graph,
                drift.eager,
                drift.z,
            )
