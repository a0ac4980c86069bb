"""The metrics page: SGLang's names, the scheduler's statistics, and rates by their definitions."""

from __future__ import annotations

from copy import deepcopy

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from runtime.entrypoints.openai.protocol import SpeculativeUsage
from runtime.managers.messages import Finish
from runtime.managers.observers.metrics import Metrics
from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.scheduler_stats import GroupLoad, SchedulerStats
from runtime.managers.telemetry.spec_stats import SpecStats, context_class
from runtime.worker_info import AcceptanceCounts, AcceptanceStats, Drift, RunnerRuns, WorkerInfo

SGLANG = {
    "num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate", "gen_throughput", "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total", "num_requests_total", "num_aborted_requests_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "queue_time_seconds", "spec_accept_length", "spec_accept_rate", "num_retracted_requests_total",
    "max_total_num_tokens",
}  # fmt: skip
STATS = SchedulerStats(
    num_running_reqs=3,
    num_queue_reqs=2,
    gen_throughput=12.5,
    max_total_num_tokens=4096,
    num_retracted_requests_total=7,
    pages_free=11,
    pages_total=44,
    cached_states=3,
    max_cached_states=12,
    spec_by_context={"0": SpecStats(5, 15, 10, [5, 4, 1]), "1024": SpecStats(5, 15, 5, [4, 1, 0])},
    decode=DecodeStats(10, 9, 30, 10),
    startup_seconds={"weights": 1.5, "graphs": 2.0},
)


def scraped(metrics: Metrics, stats: SchedulerStats | None = None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels, less the model's name."""
    text, media_type = metrics.render(stats)
    assert media_type.startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            samples[sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))] = sample.value
    return samples


def test_every_name_that_dashboards_know_is_there() -> None:
    text = Metrics("m").render(STATS)[0].decode()
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {f"sglang:{name}" for name in SGLANG} <= declared


def test_only_counters_are_called_totals() -> None:
    text = Metrics("m").render(STATS)[0].decode()
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert {kind for name, kind in kinds.items() if name.endswith("_total")} == {"counter"}


def test_scheduler_stats_are_read_at_every_scrape() -> None:
    stats = structs.replace(STATS)
    metrics = Metrics("m")
    assert scraped(metrics, stats)["sglang:num_running_reqs", ()] == 3
    stats.num_running_reqs = 5
    samples = scraped(metrics, stats)
    assert samples["sglang:num_running_reqs", ()] == 5
    assert samples["sglang:num_retracted_requests_total", ()] == 7
    assert samples["sglang:spec_accept_length", ()] == 2.5
    assert samples["sglang:spec_accept_rate", ()] == 0.5
    assert samples["talon:graph_hit_rate", ()] == 0.9
    assert samples["talon:padding_waste", ()] == 0.25
    assert samples["talon:pages_free", ()] == 11
    assert samples["sglang:token_usage", ()] == 0.75
    assert samples["sglang:mamba_usage", ()] == 0.25
    assert ("sglang:mamba_usage", ()) not in scraped(metrics, structs.replace(STATS, cached_states=0, max_cached_states=0))
    totals = {"spec_verify_steps": 10, "spec_draft_tokens": 30, "spec_accepted_tokens": 15, "graph_steps": 9, "eager_steps": 1}
    assert {name: samples[f"talon:{name}_total", ()] for name in totals} == totals
    assert (samples["talon:live_rows_total", ()], samples["talon:padded_rows_total", ()]) == (30, 10)
    assert [samples["talon:spec_accept_rate_by_position", (("position", str(i)),)] for i in range(3)] == [0.9, 0.5, 0.1]
    assert samples["talon:startup_seconds", (("phase", "graphs"),)] == 2.0


def test_graph_runs_and_acceptance_drift_are_exported() -> None:
    counts = AcceptanceCounts(0, 1.0, 0, 0, [], [], [], [])
    acceptance = AcceptanceStats(counts, counts, counts, [Drift(1, 0.25, 0.75, -9.0)])
    runs = [RunnerRuns("verify", 7, 2)]
    metrics = Metrics("m")
    worker = WorkerInfo(acceptance=acceptance, graph_runs=runs, distinct_experts=14.5, distinct_experts_by_layer=[14.0, 15.0])
    samples = scraped(metrics, structs.replace(STATS, worker=worker))
    assert samples["talon:distinct_experts", ()] == 14.5
    assert [samples["talon:layer_distinct_experts", (("layer", layer),)] for layer in "01"] == [14.0, 15.0]
    assert samples["talon:spec_drifted_positions", ()] == 1
    assert samples["talon:spec_drift", (("position", "1"),)] == -0.5
    assert samples["talon:runner_runs_total", (("kind", "replayed"), ("runner", "verify"))] == 7
    well = scraped(metrics, structs.replace(STATS, worker=WorkerInfo(acceptance=structs.replace(acceptance, drift=[]))))
    assert well["talon:spec_drifted_positions", ()] == 0
    assert not {"talon:spec_drift", "talon:distinct_experts"} & {name for name, _ in well}


def test_requests_are_exported_by_attention_group() -> None:
    metrics = Metrics("m")
    assert "talon:group" not in metrics.render(SchedulerStats())[0].decode()
    text = metrics.render(SchedulerStats(groups=[GroupLoad(1, 0, 32), GroupLoad(4, 2, 96)]))[0].decode()
    assert 'talon:group_running_reqs{group="1",model_name="m"} 4.0' in text
    assert 'talon:group_queue_reqs{group="1",model_name="m"} 2.0' in text
    assert 'talon:group_used_tokens{group="0",model_name="m"} 32.0' in text


def test_before_the_first_heartbeat_there_are_no_gauges_and_no_failure() -> None:
    samples = scraped(Metrics("m"))
    assert ("sglang:num_running_reqs", ()) not in samples
    assert samples["sglang:num_requests_total", ()] == 0


def test_a_request_is_counted_through_its_life() -> None:
    metrics = Metrics("m")
    for _ in range(3):
        metrics.started(10)
    metrics.first_token(0.5)
    metrics.next_tokens(0.3, 3)
    metrics.next_tokens(0.2, 0)
    for finish in (Finish(reason="length"), Finish(reason="abort"), None):
        metrics.ended(2.0, finish, Progress(10, 2, 5, 0.25))
    samples = scraped(metrics)
    assert samples["sglang:num_requests_total", ()] == 3
    assert samples["sglang:prompt_tokens_total", ()] == 30
    assert samples["sglang:generation_tokens_total", ()] == 5
    assert samples["sglang:cached_tokens_total", ()] == 2
    assert samples["sglang:num_aborted_requests_total", ()] == 2
    assert samples["sglang:time_to_first_token_seconds_sum", ()] == 0.5
    assert samples["sglang:inter_token_latency_seconds_count", ()] == 3
    assert samples["sglang:inter_token_latency_seconds_sum", ()] == pytest.approx(0.3)
    buckets = [samples["sglang:inter_token_latency_seconds_bucket", (("le", bound),)] for bound in ("0.08", "0.1", "+Inf")]
    assert buckets == [0, 3, 3]
    assert samples["sglang:e2e_request_latency_seconds_count", ()] == 1
    assert samples["sglang:queue_time_seconds_sum", ()] == 0.25


def test_two_servers_in_one_process_share_nothing() -> None:
    one, two = Metrics("m"), Metrics("m")
    one.started(1)
    assert scraped(two)["sglang:num_requests_total", ()] == 0


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=20))
def test_rates_follow_the_definition(steps: list[list[bool]]) -> None:
    accepted = [next((i for i, hit in enumerate(step) if not hit), len(step)) for step in steps]
    spec = SpecStats()
    for n in accepted:
        spec.add(n + 1, 3, 4)
    assert spec.accepted_by_position == [sum(n > i for n in accepted) for i in range(3)]
    assert spec.accept_length == pytest.approx(sum(n + 1 for n in accepted) / len(steps))
    assert spec.accept_rate == pytest.approx(sum(accepted) / (3 * len(steps)))
    assert 1 + sum(spec.accept_rate_by_position) == pytest.approx(spec.accept_length)


def test_steps_too_shallow_for_a_position_do_not_lower_its_rate() -> None:
    spec = SpecStats()
    for accept_len, depth in ((4, 3), (2, 1), (1, 1), (2, 3)):
        spec.add(accept_len, depth, 4, depth)
    assert spec.accept_rate_by_position == [0.75, 0.5, 0.5]
    before = deepcopy(spec)
    spec.add(3, 2, 4, 2)
    assert spec.since(before).accept_rate_by_position == [1.0, 1.0, None]
    assert spec.drafted_by_position == [5, 3, 2]


def test_positions_that_were_never_drafted_are_absent() -> None:
    stats = SchedulerStats()
    stats.spec_by_context["0"].add(2, 1, 4, 1)
    assert stats.figures()["per_position_acceptance"] == [1.0, None, None]
    assert stats.figures()["spec_drafted_by_position"] == [1, 0, 0]
    rates = {labels: rate for (name, labels), rate in scraped(Metrics("m"), stats).items() if name == "talon:spec_accept_rate_by_position"}
    assert rates == {(("position", "0"),): 1.0}
    assert SpeculativeUsage.model_validate(stats.spec).accept_rate_by_position == [1.0, None, None]


def test_steps_are_counted_by_depth() -> None:
    stats = SchedulerStats(spec_depth_steps_total={"3": 5, "0": 2})
    samples = scraped(Metrics("m"), stats)
    assert {labels[0][1]: n for (name, labels), n in samples.items() if name == "talon:spec_depth_steps_total"} == {"0": 2, "3": 5}


def test_accept_length_is_told_by_context_length() -> None:
    stats = SchedulerStats(spec_depth=3)
    for context, accept_len in ((0, 1), (1023, 3), (1024, 4), (70_000, 2)):
        stats.spec_by_context[context_class(context)].add(accept_len, 3, 4)
    assert stats.figures()["spec_accept_length_by_context"] == {"0": 2.0, "1024": 4.0, "65536": 2.0}
    assert stats.figures()["spec_steps_and_accepted_by_context"]["0"] == (2, 2)
    samples = scraped(Metrics("m"), stats)
    assert samples["talon:spec_accept_length_by_context", (("context", "1024"),)] == 4.0
    assert samples["talon:spec_depth", ()] == 3


def test_rates_without_a_step_are_none() -> None:
    spec, decode = SpecStats(), DecodeStats()
    assert spec.accept_length is spec.accept_rate is decode.graph_hit_rate is decode.padding_waste is None
    assert spec.accept_rate_by_position == []


def test_every_figure_of_a_worker_can_be_sent_as_json() -> None:
    info = WorkerInfo(exchange_micros={"8192": "2.8 / 9.5"}, graph_runs=[], acceptance=None)
    assert orjson.loads(orjson.dumps(msgspec.to_builtins(info)))["exchange_micros"] == {"8192": "2.8 / 9.5"}
