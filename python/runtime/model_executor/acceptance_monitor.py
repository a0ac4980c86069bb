"""Live acceptance: counted by how verification ran, and an eager sample that graphs are compared with."""

from __future__ import annotations

import logging

import numpy as np

from runtime.batch import StepStats
from runtime.model_executor.acceptance import AcceptanceCounters, DriftAlarm
from runtime.model_executor.iteration import Iteration
from runtime.worker_info import AcceptanceStats

log = logging.getLogger(__name__)
EAGER_SAMPLE_EVERY = 512
"""One iteration in this many is the eager sample: its drafts and its verification run eagerly, as do the verification and draft-extend of
the iteration before it, whose features and first guesses it starts from."""


class AcceptanceMonitor:
    """Owner of the acceptance counters. Iterations without drafts are not counted."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        K = self._num_steps
        self._graph, self._sample, self._eager = AcceptanceCounters(K), AcceptanceCounters(K), AcceptanceCounters(K)
        self.alarm = DriftAlarm(K)
        self.iterations = 0

    def next_iteration(self) -> tuple[bool, bool]:
        """Count an iteration: whether it may be the eager sample, and whether the next one may. Never without drafts."""
        self.iterations += 1
        if self._num_steps == 0:
            return False, False
        return self.iterations % EAGER_SAMPLE_EVERY == 0, (self.iterations + 1) % EAGER_SAMPLE_EVERY == 0

    def add(self, iteration: Iteration, accept_lens: np.ndarray, stats: StepStats) -> None:
        """Count an iteration that was read. On the host."""
        if iteration.depth == 0:
            return
        counters = self._sample if iteration.eager_sample else self._graph if stats.graph else self._eager
        counters.add(accept_lens, iteration.depth, stats.draft_tokens)
        if iteration.eager_sample or stats.graph:
            self.alarm.add(accept_lens, iteration.eager_sample, iteration.depth)
        if iteration.eager_sample:
            self._warn_of_drift()

    def counted(self) -> AcceptanceCounters:
        """Acceptance since the start, however it ran."""
        total = AcceptanceCounters(self._num_steps)
        for counters in (self._graph, self._sample, self._eager):
            total.merge(counters)
        return total

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
