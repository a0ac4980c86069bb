"""The admission of every attention group, of which a server without --enable-dp-attention has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runtime.batch import WorkerLimits
from runtime.config.runtime_config import SchedulerConfig
from runtime.managers import schedule_policy as policy
from runtime.managers.admission import Admission
from runtime.managers.req import Req
from runtime.managers.step_plan import StepPlan
from runtime.managers.telemetry.scheduler_stats import GroupLoad, SchedulerStats


class AttentionGroups:
    """Owner of the groups' admissions. A request is placed in a group once, and its KV and its prefix cache are there.

    Args: as for `Admission`; each group holds the limits.
    """

    def __init__(
        self, config: SchedulerConfig, cache_prefixes: bool, limits: WorkerLimits, stats: SchedulerStats, clock: Callable[[], float]
    ) -> None:
        self._groups = [Admission(config, cache_prefixes, limits, stats, clock) for _ in range(limits.groups)]
        self._config, self._limits = config, limits

    def __iter__(self) -> Iterator[Admission]:
        return iter(self._groups)

    @property
    def only(self) -> Admission:
        """The admission where there is one group."""
        (only,) = self._groups
        return only

    def of(self, req: Req) -> Admission:
        """The group of a request that was placed."""
        return self._groups[req.group]

    @property
    def running(self) -> Iterator[Req]:
        """The requests with a row, of all groups."""
        return (req for group in self._groups for req in group.running)

    @property
    def queue_is_full(self) -> bool:
        """Whether one more request would wait too many; requests that get a row at once do not count."""
        return sum(len(group.queue) - group.free_rows for group in self._groups) >= self._config.max_queued_requests

    def place(self, req: Req) -> None:
        """Let `req` wait in the group that it will run in: by its prefix and by the load."""
        if len(self._groups) > 1:
            req.group = policy.best_group(group.offer(req) for group in self._groups)
        self.of(req).enqueue(req)

    @property
    def crowded(self) -> bool:
        """Whether a request has to make way for one of another client; see `make_way`."""
        return any(group.to_retract() is not None for group in self._groups)

    def make_way(self) -> None:
        """Retract the request of each group that has to make way. No step may be in flight if there is one."""
        for group in self._groups:
            group.make_way()

    def plan_prompts(self) -> list[StepPlan]:
        """The next prompt step, a plan for each group; [] where no group has one."""
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
        """Bring the gauges up to date; `waiting`: requests that are queued before all groups. Several threads may call it."""
        pools, size = [group.kv_pages for group in self._groups], self._limits.page_size
        loads = [GroupLoad(len(group.running), len(group.queue), group.kv_pages.used * size) for group in self._groups]
        stats.groups = loads if len(loads) > 1 else []
        stats.num_running_reqs = sum(load.num_running_reqs for load in loads)
        stats.num_queue_reqs = waiting + sum(load.num_queue_reqs for load in loads)
        stats.num_used_tokens = sum(load.num_used_tokens for load in loads)
        stats.pages_total, stats.pages_free = sum(pool.num_pages for pool in pools), sum(pool.available for pool in pools)
        stats.max_total_num_tokens = self._limits.server_tokens
