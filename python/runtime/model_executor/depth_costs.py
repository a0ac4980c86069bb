"""The start-up measurement for the depth controller's cost model."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from runtime.batch import Pending, ScheduleBatch
from runtime.config.speculative_tuning import SpeculativeTuning
from runtime.model_executor.depth_controller import DepthController
from runtime.model_executor.iteration_cost import CostPoint, DistinctExperts, IterationCost
from runtime.model_executor.scratch_prompts import scratch_prompts
from runtime.model_executor.worker import Worker

log = logging.getLogger(__name__)
SIZES = (1, 4, 16, 32, 64, 128, 256)
ORDER = (0, 3, 7, 1, 5, 2)
"""Depths, the most informative ones first."""
BUDGET = 2.5
"""Seconds for all measurements. Points that are expected to take longer than the remaining time are skipped."""
ENOUGH = 0.05
"""An iteration that takes at least this many seconds runs `SLOW_RUNS` times instead of `RUNS`."""
RUNS, SLOW_RUNS = 4, 2
ROOM = 128
"""KV positions of a request in the measurement, if the context is that long."""


def start_controller(worker: Worker, tuning: SpeculativeTuning | None) -> None:
    """Start the depth controller, with the times of `tuning` or of a measurement."""
    started, control = time.perf_counter(), worker.parts.depths
    points = [] if tuning is None else [CostPoint(step.size, step.depth, step.seconds) for step in tuning.steps]
    if not points:
        with worker.parts.monitor.without_sample():
            points = without_delays(list(measure(worker)))
    mlps = worker.parts.target.runner.model.sparse_mlps
    experts = DistinctExperts(mlps[0].router.num_experts, mlps[0].router.rule.top_k) if mlps else None
    acceptance = () if tuning is None else tuning.acceptance
    control.controller = DepthController(list(control.limits), IterationCost(points, experts), acceptance, control.rows)
    seconds = time.perf_counter() - started
    worker.info().startup_seconds["measure_depths"] = round(seconds, 3)
    for size in sorted({point.size for point in points}):
        own = ", ".join(f"K={p.depth} {1e3 * p.seconds:.2f}" for p in sorted(points, key=lambda p: p.depth) if p.size == size)
        log.info("iteration of %d requests, ms by depth: %s", size, own)


def measure(worker: Worker) -> Iterator[CostPoint]:
    """Time iterations over the first rows and pages, then free them. One request at depth 0 is always measured.

    One request is measured twice at each depth, because after the start drafts load kernels during more than one iteration.
    """
    deadline = time.perf_counter() + BUDGET
    points: list[CostPoint] = []
    for size in _sizes(worker):
        worker.reset()
        scratch = ScratchRows(worker, size)
        for depth in [depth for depth in ORDER * (2 if size == 1 else 1) if worker.parts.depths.limits.get(depth, 0) >= size]:
            expected = IterationCost(points).seconds(size, depth) if points else 0.0
            if points and time.perf_counter() + SLOW_RUNS * expected >= deadline:
                continue
            if not scratch.has_room(depth):
                worker.reset()
                scratch = ScratchRows(worker, size)
            if scratch.has_room(depth):
                points.append(scratch.time(depth))
                yield points[-1]
    worker.reset()


def without_delays(points: Sequence[CostPoint]) -> list[CostPoint]:
    """One point per size and depth. A time that is longer than that of a greater depth at a similar size is reduced to it: fewer drafts are
    less work, so the machine was delayed, and the controller would hardly try the shallower depth again.
    """

    def least(point: CostPoint) -> float:
        return min(p.seconds for p in points if p.depth >= point.depth and point.size <= p.size < 2 * point.size)

    once = {(point.size, point.depth): point for point in points}
    return [replace(point, seconds=least(point)) for point in once.values()]


def _sizes(worker: Worker) -> list[int]:
    """Batch sizes to measure: one request, the maximum, and some between; only those that fit into the KV cache."""
    limits, pages = worker.limits, _pages(worker)
    most = min(limits.max_running_requests, limits.max_total_tokens // limits.page_size // pages, limits.max_extend_tokens)
    return [1, *([most] if most > 1 else []), *(size for size in SIZES if 1 < size < most)]


def _pages(worker: Worker) -> int:
    """Pages of a request."""
    page = worker.limits.page_size
    return min(-(-ROOM // page), worker.parts.target.page_table.max_pages, worker.limits.max_total_tokens // page)


class ScratchRows:
    """Requests of one random token each in the first rows, with their own pages. Equal tokens would share experts."""

    def __init__(self, worker: Worker, size: int) -> None:
        self._worker, self._size = worker, size
        self._rows = np.arange(1, size + 1, dtype=np.int32)
        self._bounds, self._step = np.ones(size, dtype=np.int32), 0
        prompts = np.random.default_rng(0).integers(worker.limits.vocab_size, size=(size, 1), dtype=np.int32)
        worker.submit(scratch_prompts(self._rows, prompts, _pages(worker))).wait()

    def has_room(self, depth: int) -> bool:
        """Whether the pages suffice to time iterations at a depth. In a short context they may not for the deepest."""
        return self._bounds[0] + RUNS * (depth + 1) <= _pages(self._worker) * self._worker.limits.page_size

    def time(self, depth: int) -> CostPoint:
        """The median time of a few iterations at a depth, each submitted before the previous one is read if steps overlap.

        The first does not count: no draft extend precedes it, and it may load kernels. The median is used because a result that is read
        late makes one time too long and the next too short.
        """
        found, ahead, last = list[float](), self._worker.limits.overlap, time.perf_counter()
        with self._worker.parts.depths.forced(depth):
            pending, submitted = [self._submit(depth)], 1
            while pending:
                pending.pop(0).wait()
                now = time.perf_counter()
                found.append(now - last)
                last = now
                runs = SLOW_RUNS if min(found) > ENOUGH else RUNS
                while submitted < runs and len(pending) < 1 + ahead:
                    pending.append(self._submit(depth))
                    submitted += 1
        return CostPoint(self._worker.parts.verifier.padded_size(depth, self._size), depth, statistics.median(found[1:]))

    def _submit(self, depth: int) -> Pending:
        self._step += 1
        batch = ScheduleBatch(self._step, self._rows, self._bounds.copy(), np.full(self._size, -1, dtype=np.int32))
        self._bounds += depth + 1
        return self._worker.submit(batch)
