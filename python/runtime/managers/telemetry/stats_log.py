"""The log line about the scheduler's recent steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy

from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.spec_stats import SpecStats

log = logging.getLogger(__name__)

RATE_PERIOD = 1.0
"""Seconds over which `gen_throughput` is measured."""
LOG_PERIOD = 5.0
"""Minimum seconds between two log lines."""


class StatsLog:
    """Updates `gen_throughput` each second, and logs a line every few seconds in which steps ran.

    Args:
        stats: returns the scheduler's statistics with its gauges up to date.
        now: the start, in seconds of the scheduler's clock.
    """

    def __init__(self, stats: Callable[[], SchedulerStats], now: float) -> None:
        self._stats = stats
        self._logged_at, self._logged = now, deepcopy(stats())
        self._rated_at, self._rated_tokens = now, self._logged.generation_tokens_total

    def tick(self, now: float) -> None:
        """Called once per step; does nothing until a period is over."""
        if now - self._rated_at >= RATE_PERIOD:
            stats = self._stats()
            stats.gen_throughput = (stats.generation_tokens_total - self._rated_tokens) / (now - self._rated_at)
            self._rated_at, self._rated_tokens = now, stats.generation_tokens_total
        if now - self._logged_at >= LOG_PERIOD:
            stats = self._stats()
            if stats.steps > self._logged.steps:
                log.info("%s", _line(stats, self._logged, now - self._logged_at))
            self._logged_at, self._logged = now, deepcopy(stats)


def _line(stats: SchedulerStats, before: SchedulerStats, seconds: float) -> str:
    return ", ".join(
        [
            f"Decode batch, #running-req: {stats.num_running_reqs}",
            f"token usage: {stats.token_usage:.2f}",
            *_of_drafts(stats.spec.since(before.spec)),
            *_of_depths(stats.spec_depth_steps_total, before.spec_depth_steps_total),
            *_of_graphs(stats.decode.since(before.decode)),
            f"gen throughput (token/s): {(stats.generation_tokens_total - before.generation_tokens_total) / seconds:.2f}",
            f"prompt (token/s): {(stats.prompt_tokens_total - before.prompt_tokens_total) / seconds:.2f}",
            f"#queue-req: {stats.num_queue_reqs}",
        ]
    )


def _of_drafts(spec: SpecStats) -> list[str]:
    """Accept length, and the acceptance rate by position among the verify steps at least that deep."""
    if not spec.verify_steps:
        return []
    rates = ("-" if rate is None else f"{rate:.2f}" for rate in spec.accept_rate_by_position)
    return [
        f"accept len: {spec.accept_length:.2f}",
        f"accepted by position: {' '.join(rates)}",
        f"accepted/drafted: {spec.accepted_tokens}/{spec.draft_tokens}",
    ]


def _of_depths(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """Steps by depth, if there were several depths."""
    if len(now) < 2:
        return []
    steps = ((depth, now[depth] - before.get(depth, 0)) for depth in sorted(now, key=int))
    return ["steps by depth: " + " ".join(f"{depth}:{count}" for depth, count in steps if count)]


def _of_graphs(decode: DecodeStats) -> list[str]:
    """Fraction of decode steps that replayed a graph, and of computed rows that were padding."""
    if not decode.steps:
        return []
    return [f"graph hits: {decode.graph_hit_rate:.2f}", f"padding: {decode.padding_waste or 0.0:.2f}"]
