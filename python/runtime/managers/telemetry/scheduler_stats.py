"""The scheduler's gauges and counters, for metrics, server info and log."""

from __future__ import annotations

from functools import reduce

import msgspec

from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.spec_stats import SpecStats, no_drafts
from runtime.worker_info import WorkerInfo


class GroupLoad(msgspec.Struct, frozen=True):
    """The current load of one attention group; the fields are those of `SchedulerStats`."""

    num_running_reqs: int
    num_queue_reqs: int
    num_used_tokens: int


class SchedulerStats(msgspec.Struct, kw_only=True, tag=True):
    """Current gauges, and counters since the start. Times are in seconds. Each attention group counts its own steps.

    Attributes:
        num_used_tokens: KV slots that running requests need.
        groups: the load of each attention group; [] without --enable-dp-attention.
        queue_time_sum, queue_time_count: waiting time of all admitted requests, and their number.
        cached_states, max_cached_states: recurrent states of cached prefixes, and slots for them.
        extend_steps, mixed_steps: steps with prompt tokens, and those of them that also had decode rows.
        spec_paused_steps_total: steps with decode rows that ran without drafts; not counted in `spec`.
        spec_depth_steps_total: steps with decode rows, by the depth of their drafts; empty without speculation.
        decode: steps without prompt tokens.
        spec_by_context: all drafts, by the class of the context length of their request.
        spec_depth: depth of the latest step with decode rows.
        startup_seconds: duration of each phase of the start.
        worker: the worker's report; None in heartbeats.
    """

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    pages_free: int = 0
    pages_total: int = 0
    cached_states: int = 0
    max_cached_states: int = 0
    gen_throughput: float = 0.0
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
    spec_paused_steps_total: int = 0
    spec_depth_steps_total: dict[str, int] = {}
    decode: DecodeStats = msgspec.field(default_factory=DecodeStats)
    spec_by_context: dict[str, SpecStats] = msgspec.field(default_factory=no_drafts)
    spec_depth: int = 0
    startup_seconds: dict[str, float] = {}
    groups: list[GroupLoad] = []
    worker: WorkerInfo | None = None

    @property
    def spec(self) -> SpecStats:
        """All drafts."""
        return reduce(SpecStats.plus, self.spec_by_context.values(), SpecStats())

    @property
    def accept_length_by_context(self) -> dict[str, float]:
        """Accept length of each class of context lengths that has verify steps."""
        return {name: length for name, spec in self.spec_by_context.items() if (length := spec.accept_length) is not None}

    @property
    def steps(self) -> int:
        """Number of steps, with or without prompt tokens."""
        return self.extend_steps + self.decode.steps

    @property
    def token_usage(self) -> float:
        """Fraction of the KV pages in use, 0 to 1."""
        return (self.pages_total - self.pages_free) / self.pages_total if self.pages_total else 0.0

    @property
    def mamba_usage(self) -> float | None:
        """Fraction of the slots for recurrent states of cached prefixes in use, 0 to 1; None if there are no slots."""
        return self.cached_states / self.max_cached_states if self.max_cached_states else None

    @property
    def cache_hit_rate(self) -> float:
        """Fraction of the prompt tokens found in the prefix cache, 0 to 1."""
        return self.cached_tokens_total / self.prompt_tokens_total if self.prompt_tokens_total else 0.0

    def admitted(self, progress: Progress) -> None:
        """Count the first admission of a request."""
        self.prompt_tokens_total += progress.prompt_tokens
        self.cached_tokens_total += progress.cached_tokens
        self.queue_time_sum += progress.queue_seconds
        self.queue_time_count += 1

    def count_depth(self, depth: int) -> None:
        """Count a step with decode rows by the depth of its drafts."""
        self.spec_depth = depth
        self.spec_paused_steps_total += not depth
        self.spec_depth_steps_total[str(depth)] = self.spec_depth_steps_total.get(str(depth), 0) + 1

    def figures(self) -> dict[str, object]:
        """All figures, by the names that /get_server_info uses."""
        decode, spec = self.decode, self.spec
        parts = ("decode", "spec_by_context", "worker", "groups")
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in parts}
        return own | {
            "groups": msgspec.to_builtins(self.groups),
            "worker": {} if self.worker is None else msgspec.to_builtins(self.worker),
            "token_usage": self.token_usage,
            "mamba_usage": self.mamba_usage,
            "cache_hit_rate": self.cache_hit_rate,
            "queue_time": self.queue_time_sum / self.queue_time_count if self.queue_time_count else 0.0,
            "decode_steps": decode.steps,
            "graph_steps_total": decode.graph_steps,
            "eager_steps_total": decode.steps - decode.graph_steps,
            "live_rows_total": decode.live_rows,
            "padded_rows_total": decode.padded_rows,
            "spec_verify_steps_total": spec.verify_steps,
            "spec_draft_tokens_total": spec.draft_tokens,
            "spec_accepted_tokens_total": spec.accepted_tokens,
            "spec_accepted_by_position": spec.accepted_by_position,
            "spec_drafted_by_position": spec.drafted_by_position,
            "spec_accept_length": spec.accept_length or 0.0,
            "avg_spec_accept_length": spec.accept_length,
            "spec_accept_rate": spec.accept_rate,
            "per_position_acceptance": spec.accept_rate_by_position,
            "spec_accept_length_by_context": self.accept_length_by_context,
            "spec_steps_and_accepted_by_context": {
                name: (spec.verify_steps, spec.accepted_tokens) for name, spec in self.spec_by_context.items()
            },
            **decode.shares(),
        }
