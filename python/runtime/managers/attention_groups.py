"""The admissions of all attention groups; a server without --enable-dp-attention has one group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.batch import WorkerLimits
from runtime.managers import schedule_policy as policy
from runtime.managers.admission import Admission
from runtime.managers.req import Req
from runtime.managers.step_plan import StepPlan
from runtime.managers.telemetry.scheduler_stats import GroupLoad, SchedulerStats


class AttentionGroups:
    """Owner of the groups' admissions. A request stays in the group that it was placed in, which has its KV and prefix cache.

    Args:
        max_queued: --max-queued-requests.
        limits: the worker's limits, which apply to each group.
    """

    def __init__(self, groups: Sequence[Admission], max_queued: int, limits: WorkerLimits) -> None:
        self._groups, self._max_queued, self._limits = groups, max_queued, limits

    def __iter__(self) -> Iterator[Admission]:
        return iter(self._groups)

    @property
    def only(self) -> Admission:
        """The admission of a server with one group."""
        (only,) = self._groups
        return only

    def of(self, req: Req) -> Admission:
        """The group that `req` was placed in."""
        return self._groups[req.group]

    @property
    def queue_is_full(self) -> bool:
        """Whether one more waiting request would exceed --max-queued-requests; requests that get a row at once do not count."""
        return sum(len(group.queue) - group.free_rows for group in self._groups) >= self._max_queued

    def place(self, req: Req) -> None:
        """Choose a group for `req` by its cached prefix and the load, and add it to that group's queue."""
        if len(self._groups) > 1:
            req.group = policy.best_group(group.offer(req) for group in self._groups)
        self.of(req).enqueue(req)

    @property
    def wants_retraction(self) -> bool:
        """Whether a running request should be retracted for a waiting one of another client."""
        return any(group.retraction_candidate() is not None for group in self._groups)

    def retract_for_waiting(self) -> None:
        """Retract the `retraction_candidate` of each group. If there is one, no step may be in flight."""
        for group in self._groups:
            group.retract_for_waiting()

    def plan_prompts(self) -> list[StepPlan]:
        """The next prompt step, a plan for each group; [] if no group has prompts to run."""
        plans = [group.plan_prompts() for group in self._groups]
        return [plan or StepPlan() for plan in plans] if any(plans) else []

    def check(self) -> None:
        """Assert that no group has lost a page or shares one by mistake; for tests."""
        for group in self._groups:
            group.kv_pages.check()

    def flush(self) -> int:
        """Empty all prefix caches; returns the pages that they held."""
        return sum(group.kv_pages.flush() for group in self._groups)

    def measure(self, stats: SchedulerStats, waiting: int) -> None:
        """Update the gauges; `waiting`: requests that have no group yet. Several threads may call it."""
        pools, size = [group.kv_pages for group in self._groups], self._limits.page_size
        loads = [GroupLoad(len(group.running), len(group.queue), group.kv_pages.used * size) for group in self._groups]
        stats.groups = loads if len(loads) > 1 else []
        stats.num_running_reqs = sum(load.num_running_reqs for load in loads)
        stats.num_queue_reqs = waiting + sum(load.num_queue_reqs for load in loads)
        stats.num_used_tokens = sum(load.num_used_tokens for load in loads)
        stats.pages_total, stats.pages_free = sum(pool.num_pages for pool in pools), sum(pool.available for pool in pools)
        stats.max_total_num_tokens = self._limits.server_tokens
        stats.cached_states = sum(pool.states.used for pool in pools if pool.states is not None)
        stats.max_cached_states = self._limits.cached_states
