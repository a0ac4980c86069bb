"""Prometheus metrics: SGLang's names, so its dashboards work, and Talon's own as `talon:`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.utils import floatToGoString

from runtime.managers.messages import Finish
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.scheduler_stats import GroupLoad, SchedulerStats
from runtime.worker_info import WorkerInfo

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (1e-3, 2e-3, 4e-3, 6e-3, 8e-3, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.3, 0.5, 1, 2, 4, 8)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)

Rows = Mapping[tuple[str, ...], float]
"""Values by labels other than the model name."""
Figure = tuple[str, str, Callable[[SchedulerStats], float | None]]
"""A metric's name, its help text and a function that returns its value, or None if there is none yet."""

GAUGES: tuple[Figure, ...] = (
    ("sglang:num_running_reqs", "Running requests.", lambda s: s.num_running_reqs),
    ("sglang:num_queue_reqs", "Requests waiting for a row or for KV memory.", lambda s: s.num_queue_reqs),
    ("sglang:max_total_num_tokens", "KV slots of the server.", lambda s: s.max_total_num_tokens),
    ("sglang:token_usage", "Fraction of KV slots in use, 0 to 1.", lambda s: s.token_usage),
    ("sglang:mamba_usage", "Fraction of slots for recurrent states of cached prefixes in use, 0 to 1.", lambda s: s.mamba_usage),
    ("sglang:cache_hit_rate", "Fraction of prompt tokens found in the prefix cache, 0 to 1.", lambda s: s.cache_hit_rate),
    ("sglang:gen_throughput", "Tokens generated per second, over the last second.", lambda s: s.gen_throughput),
    ("sglang:num_used_tokens", "KV slots used by running requests.", lambda s: s.num_used_tokens),
    ("talon:spec_depth", "Draft depth of the latest step with decode rows.", lambda s: s.spec_depth),
    ("talon:pages", "KV pages of the server.", lambda s: s.pages_total),
    ("talon:pages_free", "KV pages that are free, or cached and not in use.", lambda s: s.pages_free),
    ("sglang:spec_accept_length", "Mean tokens committed per verify step, including the bonus token.", lambda s: s.spec.accept_length),
    ("sglang:spec_accept_rate", "Fraction of draft tokens accepted.", lambda s: s.spec.accept_rate),
    ("talon:graph_hit_rate", "Fraction of decode steps that replayed a graph.", lambda s: s.decode.graph_hit_rate),
    ("talon:padding_waste", "Fraction of computed decode rows that were padding.", lambda s: s.decode.padding_waste),
)
COUNTERS: tuple[Figure, ...] = (
    ("sglang:num_retracted_requests", "Retracted requests.", lambda s: s.num_retracted_requests_total),
    ("talon:failed_steps", "Steps that raised an error; their requests failed.", lambda s: s.num_failed_steps_total),
    ("talon:extend_steps", "Steps with prompt tokens.", lambda s: s.extend_steps),
    ("talon:mixed_steps", "Steps with prompt tokens and decode rows.", lambda s: s.mixed_steps),
    ("talon:graph_steps", "Decode steps that replayed a graph.", lambda s: s.decode.graph_steps),
    ("talon:eager_steps", "Decode steps that ran eagerly.", lambda s: s.decode.steps - s.decode.graph_steps),
    ("talon:live_rows", "Requests in decode steps, summed over steps.", lambda s: s.decode.live_rows),
    ("talon:padded_rows", "Padding rows in decode steps, summed over steps.", lambda s: s.decode.padded_rows),
    ("talon:spec_verify_steps", "Verify steps, counted per request.", lambda s: s.spec.verify_steps),
    ("talon:spec_draft_tokens", "Draft tokens verified.", lambda s: s.spec.draft_tokens),
    ("talon:spec_accepted_tokens", "Draft tokens accepted.", lambda s: s.spec.accepted_tokens),
    ("talon:spec_paused_steps", "Decode steps without drafts.", lambda s: s.spec_paused_steps_total),
)
GROUP_GAUGES: tuple[tuple[str, str, Callable[[GroupLoad], float]], ...] = (
    ("talon:group_running_reqs", "Running requests, by attention group.", lambda g: g.num_running_reqs),
    ("talon:group_queue_reqs", "Requests waiting for a row or for KV memory, by attention group.", lambda g: g.num_queue_reqs),
    ("talon:group_used_tokens", "KV slots used by running requests, by attention group.", lambda g: g.num_used_tokens),
)
"""Gauges of a server with --enable-dp-attention."""


class Metrics:
    """Counters and histograms of the HTTP process, rendered together with the scheduler's statistics.

    Each instance has its own registry. The tokenizer manager reports every choice, from `started` to `ended`.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model_name
        self._scheduler = _SchedulerCollector(model_name)
        self._requests = self._counter("sglang:num_requests", "Requests received.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Requests that were aborted or failed.")
        self._prompt_tokens = self._counter("sglang:prompt_tokens", "Prompt tokens of received requests.")
        self._generated = self._counter("sglang:generation_tokens", "Tokens generated for requests that finished.")
        self._cached = self._counter("sglang:cached_tokens", "Prompt tokens read from the prefix cache.")
        self._ttft = self._histogram("sglang:time_to_first_token_seconds", "Time to the first token.", TTFT_BUCKETS)
        self._itl = _Intervals("sglang:inter_token_latency_seconds", "Time between tokens.", ITL_BUCKETS, model_name)
        self._e2e = self._histogram("sglang:e2e_request_latency_seconds", "Time to the last token.", E2E_BUCKETS)
        self._queue = self._histogram("sglang:queue_time_seconds", "Time from arrival to the first step.", QUEUE_BUCKETS)
        self.registry.register(self._scheduler)
        self.registry.register(self._itl)

    def started(self, prompt_tokens: int) -> None:
        """A request was received."""
        self._requests.inc()
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """The first tokens of a request arrived, `seconds` after its start."""
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` more tokens arrived, `seconds` after the previous ones."""
        if tokens:
            self._itl.observe(seconds / tokens, tokens)

    def ended(self, seconds: float, finish: Finish | None, progress: Progress) -> None:
        """A request ended, `seconds` after its start; `finish` is None if it failed or its client disconnected."""
        if finish is None or finish.reason == "abort":
            self._aborted.inc()
            return
        self._e2e.observe(seconds)
        self._queue.observe(progress.queue_seconds)
        self._generated.inc(progress.completion_tokens)
        self._cached.inc(progress.cached_tokens)

    def render(self, stats: SchedulerStats | None) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type.

        Args:
            stats: the scheduler's latest statistics; None before its first heartbeat.
        """
        self._scheduler.latest = stats
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, ("model_name",), registry=self.registry).labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, ("model_name",), registry=self.registry, buckets=buckets).labels(self._model)


class _Intervals:
    """A histogram that counts several equal values in one call, so a stream chunk needs one bucket search."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], model_name: str) -> None:
        self._name, self._help, self._model = name, help_text, model_name
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        """Count `value` `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        """The histogram."""
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        names = [floatToGoString(bound) for bound in self._bounds]
        family.add_metric([self._model], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family


class _SchedulerCollector:
    """Turns the scheduler's latest statistics into metrics."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.latest: SchedulerStats | None = None

    def collect(self) -> Iterable[Metric]:
        """All metrics that have a value."""
        stats = self.latest
        if stats is None:
            return
        for kind, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, help_text, value in figures:
                if (figure := value(stats)) is not None:
                    yield self._family(kind, name, help_text, {(): figure})
        for name, help_text, load in GROUP_GAUGES if stats.groups else ():
            yield self._gauge(name, help_text, {(str(i),): load(group) for i, group in enumerate(stats.groups)}, "group")
        rates = {(str(i),): rate for i, rate in enumerate(stats.spec.accept_rate_by_position) if rate is not None}
        depths = {(depth,): float(count) for depth, count in sorted(stats.spec_depth_steps_total.items())}
        yield self._family(CounterMetricFamily, "talon:spec_depth_steps", "Steps with decode rows, by draft depth.", depths, "depth")
        help_text = "Fraction of verify steps of this depth or more that accepted the draft at this position."
        yield self._gauge("talon:spec_accept_rate_by_position", help_text, rates, "position")
        by_context = {(start,): length for start, length in stats.accept_length_by_context.items()}
        help_text = "Accept length by context length; the label is the lower bound of the bucket."
        yield self._gauge("talon:spec_accept_length_by_context", help_text, by_context, "context")
        phases = {(phase,): seconds for phase, seconds in stats.startup_seconds.items()}
        yield self._gauge("talon:startup_seconds", "Duration of each start-up phase.", phases, "phase")
        if stats.worker is not None:
            yield from self._of_worker(stats.worker)

    def _of_worker(self, worker: WorkerInfo) -> Iterable[Metric]:
        """Runs of each graph runner, and whether graphs accept as many drafts as eager steps."""
        runs = {(run.runner, "replayed"): float(run.replayed) for run in worker.graph_runs}
        runs |= {(run.runner, "eager"): float(run.eager) for run in worker.graph_runs}
        yield self._family(CounterMetricFamily, "talon:runner_runs", "Runs of each graph runner, by kind.", runs, "runner", "kind")
        if worker.distinct_experts is not None:
            help_text = "Distinct experts per sparse layer in recent decode passes, averaged over layers and passes."
            yield self._gauge("talon:distinct_experts", help_text, {(): worker.distinct_experts})
            layers = {(str(i),): experts for i, experts in enumerate(worker.distinct_experts_by_layer)}
            help_text = "Distinct experts of each sparse layer in recent decode passes; layer 0 is the first sparse one."
            yield self._gauge("talon:layer_distinct_experts", help_text, layers, "layer")
        if worker.acceptance is not None:
            drift = worker.acceptance.drift
            help_text = "Draft positions at which graphs accept less than eager drafts of the same windows; 0 is normal."
            yield self._gauge("talon:spec_drifted_positions", help_text, {(): len(drift)})
            gaps = {(str(d.position),): d.graph - d.eager for d in drift}
            yield self._gauge("talon:spec_drift", "Acceptance with graphs minus acceptance of eager drafts.", gaps, "position")

    def _gauge(self, name: str, help_text: str, rows: Rows, *labels: str) -> Metric:
        return self._family(GaugeMetricFamily, name, help_text, rows, *labels)

    def _family(self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, help_text: str, rows: Rows, *labels: str) -> Metric:
        """A metric with a row per combination of label values."""
        family = kind(name, help_text, labels=["model_name", *labels])
        for values, value in rows.items():
            family.add_metric([self._model, *values], value)
        return family
