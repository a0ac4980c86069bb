"""The scheduler's gauges and counters, as the metrics endpoint and the log show them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from itertools import zip_longest

from runtime.batch import ScheduleBatch, StepStats
from runtime.managers.messages import SpecStats
from runtime.managers.telemetry.spec_stats import SpecTally
from runtime.managers.telemetry.step_stats import StepTally

log = logging.getLogger(__name__)

RATE_PERIOD = 1.0
"""Seconds over which `gen_throughput` is taken."""
LOG_PERIOD = 5.0
"""Seconds between two log lines, at least."""


@dataclass(slots=True)
class Gauges:
    """What is so right now."""

    num_running_reqs: int
    num_queue_reqs: int
    pages_used: int
    pages_total: int
    pages_free: int
    tokens_used: int
    max_total_num_tokens: int


@dataclass(slots=True)
class Mark:
    """Counters at one moment, to take rates from."""

    time: float
    generation: int = 0
    steps: int = 0
    prompt: int = 0
    decode: StepTally = field(default_factory=StepTally)
    spec: SpecStats = field(default_factory=SpecStats)


@dataclass(slots=True)
class SchedulerState:
    """Counts since start. Times are seconds of the scheduler's clock.

    Attributes:
        extend_steps, mixed_steps: steps over prompts, and those of them in which others decoded along.
        decode: of steps without prompts.
        spec: of the drafts.
    """

    started: float
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    num_requests_total: int = 0
    num_aborted_requests_total: int = 0
    num_retracted_requests_total: int = 0
    num_failed_steps_total: int = 0
    queue_time_sum: float = 0.0
    queue_time_count: int = 0
    extend_steps: int = 0
    mixed_steps: int = 0
    gen_throughput: float = 0.0
    decode: StepTally = field(default_factory=StepTally)
    spec: SpecTally = field(default_factory=SpecTally)
    _rate_mark: Mark = field(init=False)
    _log_mark: Mark = field(init=False)

    def __post_init__(self) -> None:
        self._rate_mark = Mark(self.started)
        self._log_mark = Mark(self.started)

    def admitted(self, prompt_tokens: int, cached_tokens: int, queue_seconds: float) -> None:
        """A request runs for the first time."""
        self.prompt_tokens_total += prompt_tokens
        self.cached_tokens_total += cached_tokens
        self.queue_time_sum += queue_seconds
        self.queue_time_count += 1

    def step_done(self, batch: ScheduleBatch, stats: StepStats, decoding: Iterable[StepTally]) -> None:
        """A step's result was read; `decoding` are the tallies of those who decoded in it."""
        if batch.num_prompts:
            self.extend_steps += 1
            self.mixed_steps += batch.num_decodes > 0
            return
        live, padded = batch.size, max(0, stats.padded_size - batch.size)
        self.decode.add(stats.graph, live, padded)
        for tally in decoding:
            tally.add(stats.graph, live, padded)

    def as_json(self, gauges: Gauges) -> dict[str, object]:
        """Every figure by its name in the metrics."""
        decode, spec, seen = self.decode, self.spec, self.prompt_tokens_total
        drafts = spec.stats()
        return {
            "num_running_reqs": gauges.num_running_reqs,
            "num_queue_reqs": gauges.num_queue_reqs,
            "token_usage": gauges.pages_used / gauges.pages_total,
            "num_used_tokens": gauges.tokens_used,
            "pages_free": gauges.pages_free,
            "pages_total": gauges.pages_total,
            "max_total_num_tokens": gauges.max_total_num_tokens,
            "cache_hit_rate": self.cached_tokens_total / seen if seen else 0.0,
            "gen_throughput": self.gen_throughput,
            "prompt_tokens_total": self.prompt_tokens_total,
            "cached_tokens_total": self.cached_tokens_total,
            "generation_tokens_total": self.generation_tokens_total,
            "num_requests_total": self.num_requests_total,
            "num_aborted_requests_total": self.num_aborted_requests_total,
            "num_retracted_requests_total": self.num_retracted_requests_total,
            "num_failed_steps_total": self.num_failed_steps_total,
            "queue_time": self.queue_time_sum / self.queue_time_count if self.queue_time_count else 0.0,
            "queue_time_sum": self.queue_time_sum,
            "queue_time_count": self.queue_time_count,
            "extend_steps": self.extend_steps,
            "mixed_steps": self.mixed_steps,
            "decode_steps": decode.steps,
            "graph_steps_total": decode.graph_steps,
            "eager_steps_total": decode.steps - decode.graph_steps,
            "live_rows_total": decode.live_rows,
            "padded_rows_total": decode.padded_rows,
            "spec_verify_steps_total": spec.verify_steps,
            "spec_draft_tokens_total": spec.draft_tokens,
            "spec_accepted_tokens_total": spec.accepted_tokens,
            "spec_paused_steps_total": spec.paused_steps,
            "spec_accepted_by_position": drafts.accepted_by_position,
            "spec_accept_length": drafts.accept_length,
            "spec_accept_rate": drafts.accept_rate,
        }

    def tick(self, now: float, gauges: Gauges) -> None:
        """Renew the rate, and log a line if something happened since the last."""
        if now - self._rate_mark.time >= RATE_PERIOD:
            self.gen_throughput = (self.generation_tokens_total - self._rate_mark.generation) / (now - self._rate_mark.time)
            self._rate_mark = self._mark(now)
        mark = self._log_mark
        if now - mark.time >= LOG_PERIOD and self.extend_steps + self.decode.steps > mark.steps:
            log.info("%s", self._line(now, mark, gauges))
            self._log_mark = self._mark(now)

    def _mark(self, now: float) -> Mark:
        steps = self.extend_steps + self.decode.steps
        return Mark(now, self.generation_tokens_total, steps, self.prompt_tokens_total, copy(self.decode), self.spec.stats())

    def _line(self, now: float, mark: Mark, gauges: Gauges) -> str:
        seconds = now - mark.time
        parts = [
            f"Decode batch, #running-req: {gauges.num_running_reqs}",
            f"token usage: {gauges.pages_used / gauges.pages_total:.2f}",
            f"gen throughput (token/s): {(self.generation_tokens_total - mark.generation) / seconds:.2f}",
            f"prompt (token/s): {(self.prompt_tokens_total - mark.prompt) / seconds:.2f}",
            f"#queue-req: {gauges.num_queue_reqs}",
        ]
        parts[2:2] = [*self._of_drafts(mark), *self._of_graphs(mark)]
        return ", ".join(parts)

    def _of_drafts(self, mark: Mark) -> list[str]:
        """Acceptance since `mark`; by position as the share of verify steps that accepted the draft."""
        now, before = self.spec.stats(), mark.spec
        late = SpecStats(
            verify_steps=now.verify_steps - before.verify_steps,
            draft_tokens=now.draft_tokens - before.draft_tokens,
            accepted_tokens=now.accepted_tokens - before.accepted_tokens,
        )
        if not late.verify_steps:
            return []
        pairs = zip_longest(now.accepted_by_position, before.accepted_by_position, fillvalue=0)  # before the first there are no positions
        return [
            f"accept len: {late.accept_length:.2f}",
            f"accepted by position: {' '.join(f'{(count - earlier) / late.verify_steps:.2f}' for count, earlier in pairs)}",
            f"accepted/drafted: {late.accepted_tokens}/{late.draft_tokens}",
        ]

    def _of_graphs(self, mark: Mark) -> list[str]:
        """Share of decode steps since `mark` that replayed a graph, and of computed rows that were padding."""
        late = self.decode.since(mark.decode)
        return [f"graph hits: {late.graph_hit_rate:.2f}", f"padding: {late.padding_waste or 0.0:.2f}"] if late.steps else []
