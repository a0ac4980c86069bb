"""Prometheus metrics under SGLang's names, so that its dashboards work, and Talon's own under `talon:`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from runtime.managers.generation import GenerationUpdate

State = Mapping[str, object]
"""The scheduler's gauges and counters, as its heartbeat carries them."""

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.3, 0.5, 1, 2, 4, 8)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)

GAUGES = {
    "sglang:num_running_reqs": ("num_running_reqs", "Requests that take part in steps."),
    "sglang:num_queue_reqs": ("num_queue_reqs", "Requests that wait for a row or for memory."),
    "sglang:max_total_num_tokens": ("max_total_num_tokens", "KV slots there are."),
    "sglang:token_usage": ("token_usage", "Used share of the KV slots, 0 to 1."),
    "sglang:cache_hit_rate": ("cache_hit_rate", "Share of prompt tokens found in the prefix cache, 0 to 1."),
    "sglang:gen_throughput": ("gen_throughput", "Tokens generated per second, lately."),
    "sglang:num_used_tokens": ("num_used_tokens", "KV slots that requests hold."),
    "talon:pages_total": ("pages_total", "KV pages there are."),
    "talon:pages_free": ("pages_free", "KV pages that nobody holds."),
}
COUNTERS = {
    "sglang:num_retracted_requests": ("num_retracted_requests_total", "Requests that gave their memory back and resumed later."),
    "talon:failed_steps": ("num_failed_steps_total", "Steps that raised; their requests failed, the server went on."),
    "talon:extend_steps": ("extend_steps", "Steps over prompts."),
    "talon:mixed_steps": ("mixed_steps", "Steps over prompts in which running requests decoded along."),
    "talon:graph_steps": ("graph_steps_total", "Decode steps that replayed a graph."),
    "talon:eager_steps": ("eager_steps_total", "Decode steps that ran eagerly."),
    "talon:live_rows": ("live_rows_total", "Requests in decode steps, summed over steps."),
    "talon:padded_rows": ("padded_rows_total", "Padding rows in decode steps, summed over steps."),
    "talon:spec_verify_steps": ("spec_verify_steps_total", "Verify steps, each request counted."),
    "talon:spec_draft_tokens": ("spec_draft_tokens_total", "Draft tokens verified."),
    "talon:spec_accepted_tokens": ("spec_accepted_tokens_total", "Draft tokens accepted."),
    "talon:spec_paused_steps": ("spec_paused_steps_total", "Steps without drafts, because so many requests decoded together."),
}


class Metrics:
    """Counters and histograms of the HTTP process, rendered together with the scheduler's state.

    One registry an instance, nothing global. The methods `started` to `ended` are what the tokenizer manager reports to.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model_name
        self._state = _StateCollector(model_name)
        self._requests = self._counter("sglang:num_requests", "Requests taken in.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Requests that ended without an answer: aborted or failed.")
        self._prompt_tokens = self._counter("sglang:prompt_tokens", "Prompt tokens of requests taken in.")
        self._generated = self._counter("sglang:generation_tokens", "Tokens generated for requests that finished.")
        self._cached = self._counter("sglang:cached_tokens", "Prompt tokens that came from the prefix cache.")
        self._ttft = self._histogram("sglang:time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram("sglang:inter_token_latency_seconds", "Between tokens; each token of a step counts.", ITL_BUCKETS)
        self._e2e = self._histogram("sglang:e2e_request_latency_seconds", "From arrival to the last token.", E2E_BUCKETS)
        self._queue = self._histogram("sglang:queue_time_seconds", "From the scheduler's queue to the first step.", QUEUE_BUCKETS)
        self.registry.register(self._state)

    def started(self, prompt_tokens: int) -> None:
        """A request was taken in."""
        self._requests.inc()
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """Its first tokens came, `seconds` after its arrival."""
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` more came, `seconds` after those before."""
        for _ in range(tokens):
            self._itl.observe(seconds / tokens)

    def ended(self, seconds: float, update: GenerationUpdate | None) -> None:
        """It ended, `seconds` after its arrival; None when it was aborted or failed."""
        if update is None or update.finish is None or update.finish.reason == "abort":
            self._aborted.inc()
            return
        self._e2e.observe(seconds)
        self._queue.observe(update.progress.queue_seconds)
        self._generated.inc(update.progress.completion_tokens)
        self._cached.inc(update.progress.cached_tokens)

    def render(self, state: State) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type.

        Args:
            state: the scheduler's latest; what it lacks is left out.
        """
        self._state.latest = state
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, ("model_name",), registry=self.registry).labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, ("model_name",), registry=self.registry, buckets=buckets).labels(self._model)


def accept_length(state: State) -> float | None:
    """Mean tokens that a verify step commits, the bonus token included; None before the first one.

    Source: the `accept_len` of Li et al. 2024, arXiv:2401.15077.
    """
    steps = number(state, "spec_verify_steps_total")
    return 1.0 + number(state, "spec_accepted_tokens_total") / steps if steps else None


def accept_rate(state: State) -> float | None:
    """Share of verified draft tokens that were accepted; None before the first one."""
    drafts = number(state, "spec_draft_tokens_total")
    return number(state, "spec_accepted_tokens_total") / drafts if drafts else None


def accept_rate_by_position(state: State) -> list[float]:
    """For each draft position the share of verify steps that accepted it."""
    steps, counts = number(state, "spec_verify_steps_total"), state.get("spec_accepted_by_position")
    return [float(count) / steps for count in counts] if steps and isinstance(counts, list) else []


def graph_hit_rate(state: State) -> float | None:
    """Share of decode steps that replayed a graph; None before the first one."""
    return _share(number(state, "graph_steps_total"), number(state, "eager_steps_total"))


def padding_waste(state: State) -> float | None:
    """Share of computed decode rows that were padding; None before the first one."""
    return _share(number(state, "padded_rows_total"), number(state, "live_rows_total"))


def number(state: State, key: str) -> float:
    """A number of the state, 0 where it is missing."""
    value = state.get(key, 0)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _share(part: float, rest: float) -> float | None:
    return part / (part + rest) if part + rest else None


class _StateCollector:
    """Turns the scheduler's latest state into metrics."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.latest: State = {}

    def collect(self) -> Iterable[Metric]:
        """All metrics that the state has values for."""
        state = self.latest
        for name, (key, help_text) in GAUGES.items():
            if key in state:
                yield self._gauge(name, help_text, [((), number(state, key))])
        for name, (key, help_text) in COUNTERS.items():
            if key in state:
                family = CounterMetricFamily(name, help_text, labels=["model_name"])
                family.add_metric([self._model], number(state, key))
                yield family
        yield from self._derived(state)
        worker = state.get("worker")
        if isinstance(worker, dict):
            yield from self._of_worker(worker)

    def _derived(self, state: State) -> Iterable[Metric]:
        for name, help_text, value in (
            ("sglang:spec_accept_length", "Mean tokens committed by a verify step, bonus included.", accept_length(state)),
            ("sglang:spec_accept_rate", "Share of draft tokens accepted.", accept_rate(state)),
            ("talon:graph_hit_rate", "Share of decode steps that replayed a graph.", graph_hit_rate(state)),
            ("talon:padding_waste", "Share of computed decode rows that were padding.", padding_waste(state)),
        ):
            if value is not None:
                yield self._gauge(name, help_text, [((), value)])
        rates = [((str(i),), rate) for i, rate in enumerate(accept_rate_by_position(state))]
        if rates:
            yield self._gauge("talon:spec_accept_rate_by_position", "Share of verify steps that accepted this draft.", rates, "position")
        phases = state.get("startup_seconds")
        if isinstance(phases, dict):
            seconds = [((str(phase),), float(value)) for phase, value in phases.items()]
            yield self._gauge("talon:startup_seconds", "How long each phase of the start took.", seconds, "phase")

    def _of_worker(self, worker: Mapping[str, Any]) -> Iterable[Metric]:
        """What the device side counts itself: runs of each graph runner, and whether graphs accept what eager steps accept."""
        runs = worker.get("graph_runs", [])
        if runs:
            family = CounterMetricFamily(
                "talon:runner_runs", "Runs of each graph runner, by kind.", labels=["model_name", "runner", "kind"]
            )
            for run in runs:
                for kind in ("replayed", "eager"):
                    family.add_metric([self._model, run["runner"], kind], float(run[kind]))
            yield family
        acceptance = worker.get("acceptance")
        if acceptance is not None:
            drift = acceptance["drift"]
            help_text = "Draft positions whose acceptance through graphs is not that of the eager sample; 0 is well."
            yield self._gauge("talon:spec_drifted_positions", help_text, [((), float(len(drift)))])
            gaps = [((str(d["position"]),), d["graph"] - d["eager"]) for d in drift]
            yield self._gauge("talon:spec_drift", "Acceptance through graphs less that of the eager sample.", gaps, "position")

    def _gauge(self, name: str, help_text: str, rows: list[tuple[tuple[str, ...], float]], *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help_text, labels=["model_name", *labels])
        for values, value in rows:
            family.add_metric([self._model, *values], value)
        return family
