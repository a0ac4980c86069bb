"""The benchmark package: result files, model shapes and roofs, trace analysis, tables and generated pages."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from mock_server import Script, mock_server

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark import (
    client_agreement,
    crossover,
    depth_curve,
    draft_extend_graph,
    draft_head,
    drift_alarm,
    embedded_speculation,
    faults,
    layer_times,
    lossless,
    machine,
    memory_limits,
    model_cases,
    model_matrix,
    modes,
    phases,
    random_checkpoint,
    repeat,
    report,
    server,
    serving_matrix,
    shapes,
    step_profile,
    streams,
    trace,
    verify_exact,
)
from benchmark.chat_text import chat_text
from benchmark.engine_loop import Served
from benchmark.markdown import cell, change, percent, table
from benchmark.model_bytes import roof_of
from benchmark.record import RESULTS, Record
from benchmark.step_bytes import Experts, ModelRoof, StepBytes
from benchmark.sweep import random_ids, roof_share, worker_facts

from runtime.bench.datasets import embedded_prompts
from runtime.errors import ConfigError
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.registry import build_model, load_hf_config

MACHINE = {"device": "NVIDIA H200", "gpus": ["NVIDIA H200"], "cpu": "x", "cores": 16, "python": "3.12", "packages": {"torch": "2.11.0"}}
MADE = {"commit": "abc", "command": "python -m benchmark.x"}


# ---- result files


def test_repeated_row_replaces_the_old_one(tmp_path: Path) -> None:
    record = Record("x", ("mode", "concurrency"), tmp_path)
    for concurrency, figure in ((1, 10.0), (4, 40.0), (1, 11.0)):
        record.add({"mode": "plain", "concurrency": concurrency, "figure": figure})
    again = Record("x", ("mode", "concurrency"), tmp_path)
    assert [(row["concurrency"], row["figure"]) for row in again.rows] == [(1, 11.0), (4, 40.0)]
    assert all(row["commit"] and row["command"] and row["at"] for row in again.rows)
    assert again.data["machine"]["python"] in sys.version


def test_record_refuses_rows_of_another_machine(tmp_path: Path) -> None:
    record = Record("x", ("mode",), tmp_path)
    record.add({"mode": "plain"})
    other = record.data["machine"] | {"python": "2.7"}
    record.file.write_text(json.dumps(record.data | {"machine": other}))
    with pytest.raises(machine.MachinesDiffer, match=r"x\.json: python is '3.* in one file and '2.7' in another; move the file, or write"):
        Record("x", ("mode",), tmp_path)
    assert Record("x", ("mode",), tmp_path, quick=True).rows == [], "rows of smoke runs are not kept"


def test_machine_has_one_folder_name() -> None:
    assert machine.slug(MACHINE) == "nvidia-h200"
    assert machine.slug(MACHINE | {"gpus": ["NVIDIA H200"] * 4}) == "nvidia-h200-x4"
    assert machine.slug(MACHINE | {"gpus": [], "cores": 2}) == "cpu-2"


@pytest.mark.parametrize("failed", [1, 0])
def test_benchmark_without_all_its_requests_has_no_figures(failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def client(command: list[str], **_: object) -> SimpleNamespace:
        Path(command[command.index("--output-file") + 1]).write_text(json.dumps({"completed": 3, "failed": failed}))
        return SimpleNamespace(returncode=0, stdout="", stderr="1 x closed")

    monkeypatch.setattr(server.subprocess, "run", client)
    running = cast(server.Server, SimpleNamespace(port=1, log_tail=lambda: "CUDA error"))
    with pytest.raises(server.ServerFailed, match=r"3 of 4 requests succeeded:\nCUDA error"):
        server.bench(running, ["--num-prompts", "4"])
    assert server.bench(running, ["--num-prompts", "3"])["completed"] == 3


def test_benchmarks_ask_their_server_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with mock_server(Script(ttft=0.0, gap=0.0)) as port:
        monkeypatch.setattr(server, "free_port", lambda: port)
        assert server.Server([]).http.get("/get_model_info").status_code == 200
        assert faults.ask_ms(port, "/get_model_info", 1)[1] == 200
        assert not streams.Stream(port, 2).join().failed


def test_only_a_worker_that_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(error: Exception) -> dict[str, Any]:
        monkeypatch.setattr(memory_limits, "apart", Mock(side_effect=error))
        return memory_limits.run(memory_limits.Case("tiny", 8, 64), shapes.tiny_model())

    assert run(torch.OutOfMemoryError("no memory")) == {"error": "OutOfMemoryError: no memory"}
    assert "error" in run(ConfigError("too small"))
    with pytest.raises(TypeError):
        run(TypeError("a bug"))


# ---- the roof


def test_roof_of_the_8b_shape_counts_its_bytes() -> None:
    shape = shapes.Shape.read(shapes.TARGET)
    assert shape.roof.target.read(1, 1, 0) == pytest.approx(15.01e9, rel=0.001)
    assert shape.kv_bytes_per_token == 131072
    assert shape.roof.roof_ms(0, 1, 0, 4.32e12) == pytest.approx(3.47, abs=0.01)
    assert shape.roof.roof_ms(3, 1, 0, 4.32e12) == pytest.approx(4.55, abs=0.01)


def test_roof_share_is_per_iteration() -> None:
    roof = shapes.Shape.read(shapes.TARGET).roof
    row = {"mean_tpot_ms": 2.0, "input_len": 0, "output_len": 0, "steps": 3, "accept_length": 2.5, "concurrency": 1}
    share = roof_share(row, roof, 4.32e12)
    assert share["iteration_ms"] == 5.0
    assert share["roof_share"] == pytest.approx(4.55 / 5.0, rel=0.01)
    assert roof_share(row, roof, None) == {}, "no share without a measured bandwidth"
    mixed = roof_share(row | {"steps_by_depth": {"0": 10, "3": 30}}, roof, 4.32e12)
    assert mixed["iteration_ms"] == 2.0 * (10 + 30 * 2.5) / 40, "steps without drafts commit one token"
    assert mixed["roof_ms"] == pytest.approx((10 * 3.47 + 30 * 4.55) / 40, rel=0.01)


@pytest.mark.parametrize(
    ("target", "algorithm", "draft", "plain", "drafts"),
    [
        ("llama-3-8b", "EAGLE", "llama-3-8b-eagle", [284, 3807], [543, 7476]),
        ("qwen3-30b-a3b-fp8", "EAGLE3", "qwen3-30b-a3b-eagle3", [1229, 3060], [1154, 5137]),
        ("gpt-oss-20b", "EAGLE3", "gpt-oss-20b-eagle3", [1153, 5739], [1280, 11417]),
        ("glm-4.7-flash", "MTP", None, [597, 1696], [569, 2674]),
        ("mimo-7b", "MTP", None, [304, 3940], [663, 8689]),
    ],
)
def test_roof_counts_the_bytes_of_a_checkpoint(target: str, algorithm: str, draft: str | None, plain: list[int], drafts: list[int]) -> None:
    """Tokens per second at concurrency 1 and 16, context 1500, three drafts and accept length 2.5."""
    hot_tokens = 32000 if target == "mimo-7b" else None
    roof = roof_of(shapes.CONFIGS / target, algorithm, None if draft is None else shapes.CONFIGS / draft, hot_tokens)
    assert [round(1000 * c / roof.roof_ms(0, c, 1500, 4.32e12)) for c in (1, 16)] == plain
    assert [round(2500 * c / roof.roof_ms(3, c, 1500, 4.32e12)) for c in (1, 16)] == drafts


def test_ranks_read_replicated_weights_and_latent_rows_each() -> None:
    roof = StepBytes(100.0, Experts(8, 2, 10.0, 1), full_kv=4.0, whole=20.0, shared_kv=True)
    assert roof.of_ranks(2).read(1, 1, 3) == roof.read(1, 1, 3) + 20 + 4 * 3


@pytest.mark.parametrize(
    ("target", "algorithm", "draft", "replicated"),
    [
        ("llama-3-8b", "EAGLE", "llama-3-8b-eagle", 3 * 2 * 2 * 4096 * 4096),
        ("llama-3-70b", "EAGLE3", "llama-3-70b-eagle3", 2 * 3 * 8192 * 8192),
        ("mimo-7b", "MTP", None, 3 * 2 * 2 * 4096 * 4096),
    ],
)
def test_each_rank_reads_the_layer_that_fuses_draft_inputs(target: str, algorithm: str, draft: str | None, replicated: int) -> None:
    roof = roof_of(shapes.CONFIGS / target, algorithm, None if draft is None else shapes.CONFIGS / draft)
    assert roof.of_ranks(4).bytes(3, 1, 0) - roof.bytes(3, 1, 0) == 3 * replicated
    if target == "llama-3-8b":
        assert shapes.Shape.read(shapes.TARGET).roof.of_ranks(4).bytes(3, 1, 0) == pytest.approx(roof.of_ranks(4).bytes(3, 1, 0), rel=1e-4)


def test_block_draft_runs_once_per_iteration() -> None:
    target, draft = StepBytes(100.0, None, 0.0), StepBytes(10.0, None, 0.0, first=1.0)
    assert ModelRoof(target, draft).bytes(3, 1, 0) == 131
    assert ModelRoof(target, draft, one_pass=True).bytes(15, 1, 0) == 111


def test_roof_reads_the_experts_that_were_counted() -> None:
    roof = ModelRoof(StepBytes(100.0, Experts(8, 2, 10.0, 3), full_kv=0.0), StepBytes(0.0, None, 0.0))
    row = {"mean_tpot_ms": 1.0, "input_len": 0, "output_len": 0, "steps": 3, "accept_length": 2.0, "concurrency": 1}
    counted, assumed = (roof_share(row | more, roof, 1e6) for more in ({"distinct_experts": 3.0}, {}))
    assert counted["roof_ms"] == pytest.approx((100 + 3 * 3 * 10) / 1e3)
    assert assumed["roof_ms"] == pytest.approx((100 + 3 * 8 * (1 - 0.75**4) * 10) / 1e3)
    assert [("roof_assumed" in found) for found in (counted, assumed)] == [False, True]
    assert "roof_assumed" not in roof_share(row | {"steps": 0}, roof, 1e6), "one token reads top_k experts"
    served_row = served(mode="plain", input_len=1000, output_len=300, **assumed)
    assert "| plain | 400 (≤ 13 %) |" in model_matrix.summary(result([served_row]))


def test_rows_of_other_loads_have_their_own_tables() -> None:
    loads: list[dict[str, Any]] = [{"output_len": 300}, {"output_len": 400}, {"output_len": 300, "tp_size": 2}]
    rows = [served(mode="plain", input_len=1000, output_throughput=100.0 + i, **load) for i, load in enumerate(loads)]
    text = model_matrix.summary(result(rows))
    assert re.findall(r"\*\*(.*)\*\*", text) == ["m, 1000 → 300 tokens", "m, 1000 → 400 tokens", "m, on 2 GPUs, 1000 → 300 tokens"]
    assert re.findall(r"\| plain \| (\d+)", text) == ["100", "101", "102"]


@pytest.mark.parametrize(
    ("drafts", "ratio"),
    [
        ({}, "1.50x"),
        ({"commit": "b"}, "-"),
        ({"server_flags": "--model-path m --dtype float32 --speculative-algorithm MTP"}, "-"),
    ],
)
def test_drafts_are_compared_with_the_same_server_without_them(drafts: dict[str, Any], ratio: str) -> None:
    flags = "--model-path m --context-length 4096"
    row = served(mode="plain", input_len=1000, output_len=300, server_flags=flags) | MADE
    faster = row | {"mode": "accept-2.5", "output_throughput": 600.0, "server_flags": f"{flags} --speculative-algorithm MTP"} | drafts
    text = model_matrix.summary({"machine": MACHINE, "rows": [row, faster | {"accept_length": 2.781}]})
    assert f"| accept-2.5 / plain | {ratio} |" in text
    assert "| tokens per step, accept-2.5 | 2.78 |" in text


@pytest.mark.parametrize("other", [{"model": "n"}, {"input_len": 1000}, {"output_len": 512}])
def test_depths_are_compared_for_one_load(other: dict[str, Any]) -> None:
    speeds = {"off": (None, 100.0), "auto": ("2.5", 150.0)}
    rows = [
        served(input_len=128, output_len=128, speculation=name, acceptance=acceptance, output_throughput=factor * speed) | more
        for factor, more in ((1, {}), (3, other))
        for name, (acceptance, speed) in speeds.items()
    ]
    text = depth_curve.render(result(rows))
    assert re.findall(r"auto, tok/s \| (.*) \|", text) == ["150.0", "450.0"]
    assert text.count("auto / no drafts | 1.50 |") == 2
    assert depth_curve.summary(result(rows[:2])).count("| 2.5: auto, tok/s | 150.0 |") == 1


def test_distinct_experts_need_enough_passes_of_their_load() -> None:
    facts = {"distinct_experts": 9.5, "exchange_micros": {"8192": "4.8"}, "depth": None}
    row = {"total_output_tokens": 1000, "concurrency": 2, "accept_length": None}
    assert worker_facts(row, facts) == {"distinct_experts": 9.5, "exchange_micros": {"8192": "4.8"}}
    assert worker_facts(row | {"accept_length": 2.5}, facts) == {"exchange_micros": {"8192": "4.8"}}


def test_layer_times_extrapolate_by_bytes_and_exchanges() -> None:
    part = layer_times.Part(ms=0.12, exchanges=2, bytes={2: 100.0, 8: 120.0})
    assert part.on(8, 2, 0.01, 0.02) == pytest.approx(0.1 * (120 / 8) / (100 / 2) + 0.04)
    shared = {"mode": "plain", "concurrency": 1, "steps": 0, "tp_size": 2, "input_len": 1000, "output_len": 1000, "accept_length": None}
    shared |= {"exchange_micros": {"8192": "2.5 / 7.3", "32768": "2.9 / 8.0"}}
    rows = [
        shared | {"model": name, "iteration_ms": ms, "roof_ms": roof}
        for name, ms, roof in ((layer_times.MORE, 1.3, 0.7), (layer_times.FEWER, 0.9, 0.5))
    ]
    text = layer_times.summary(rows)
    assert "| plain, c=1, on 2 GPUs | 0.100 | 0.050 | 50% | 2.9 |" in text
    assert "assumptions" in text
    assert layer_times.summary(rows[:1]) == ""
    assert layer_times.summary([rows[0], rows[1] | {"tp_size": 4}]) == "", "runs on as many GPUs are compared"


def test_random_checkpoint_loads_into_its_model(tmp_path: Path) -> None:
    target, _ = shapes.write_tiny(tmp_path)
    folder = random_checkpoint.write(target, tmp_path / "checkpoint")
    model = build_model(load_hf_config(folder), TorchOps(), torch.float32, torch.device("cpu"))
    model.load(safetensors_weights(folder, progress=False))
    gate = model.layers[0].mlp.gate_up_proj.weight
    assert 0.015 < float(gate.std()) < 0.025
    assert bool((model.final_norm.weight == 1).all())
    assert not torch.equal(gate, model.layers[1].mlp.gate_up_proj.weight)


def test_partly_written_checkpoint_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[Path]()

    def write(shape: Path, folder: Path, changes: object) -> Path:
        written.append(folder)
        return random_checkpoint.write_config(shape, folder, {})

    monkeypatch.setattr(random_checkpoint, "write", write)
    folder = model_cases.prepare(model_cases.CASES["gpt-oss-20b"], tmp_path).folder
    model_cases.prepare(model_cases.CASES["gpt-oss-20b"], tmp_path)
    assert written == [folder, folder], "config.json alone is no checkpoint"
    (folder / "model.safetensors.index.json").touch()
    model_cases.prepare(model_cases.CASES["gpt-oss-20b"], tmp_path)
    assert len(written) == 2


@pytest.mark.parametrize(
    ("script", "flags"), [(lossless, ["--prompts", "0"]), (drift_alarm, ["--iterations", "-1"]), (crossover, ["--concurrency", "4,0"])]
)
def test_counts_below_one_are_refused(
    script: Any, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags])
    with pytest.raises(SystemExit) as exit_info:
        script.main()
    assert exit_info.value.code == 2
    assert f"argument {flags[0]}: " in capsys.readouterr().err


def test_reference_workload_sends_twice_the_concurrency() -> None:
    assert [random_ids(c, 1000, 1000).labels["num_prompts"] for c in (1, 4, 32)] == [2, 8, 64]


# ---- traces


def event(name: str, ts: float, dur: float, cat: str, correlation: int | None = None) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": {} if correlation is None else {"correlation": correlation}}


def iteration(at: float, number: int) -> list[dict[str, Any]]:
    """100 µs: draft-decode launches two kernels, draft-extend replays one graph of two kernels that overlap by 5 µs."""
    first = number * 10
    return [
        event("talon::draft_decode", at, 30, "user_annotation"),
        event("talon::draft_decode", at + 40, 30, "gpu_user_annotation"),
        event("cudaLaunchKernel", at + 5, 2, "cuda_runtime", first),
        event("cudaLaunchKernel", at + 15, 2, "cuda_runtime", first + 1),
        event("gemm", at + 20, 10, "kernel", first),
        event("gemm", at + 30, 10, "kernel", first + 1),
        event("talon::draft_extend", at + 50, 20, "user_annotation"),
        event("talon::plan", at + 52, 3, "user_annotation"),
        event("cudaGraphLaunch", at + 60, 5, "cuda_runtime", first + 2),
        event("gemm", at + 62, 20, "kernel", first + 2),
        event("norm", at + 77, 10, "kernel", first + 2),
        event("Memcpy", at + 90, 5, "gpu_memcpy", first + 3),
        event("cudaMemcpyAsync", at + 88, 1, "cuda_runtime", first + 3),
    ]


def test_trace_is_split_into_whole_iterations(tmp_path: Path) -> None:
    events = [e for n in range(5) for e in iteration(1000.0 + 100 * n, n)]
    random.Random(0).shuffle(events)
    file = tmp_path / "t.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}).encode()))
    profile = trace.analyse(trace.load(file))
    assert (profile.iterations, profile.period_us) == (4, 100.0)
    assert profile.gpu_busy_us == pytest.approx(20 + 25 + 5)
    assert profile.host_us == pytest.approx({"draft_decode": 30, "draft_extend": 20, "plan": 3})
    assert profile.gpu_us == pytest.approx({"draft_decode": 20, "draft_extend": 30, "other": 5})
    assert (profile.kernels, profile.launches, profile.graph_launches, profile.copies) == (4, 3, 1, 1)
    assert profile.top_kernels[0] == ("gemm", pytest.approx(40))


def test_trace_needs_two_iterations() -> None:
    with pytest.raises(ValueError, match="1 iterations"):
        trace.analyse(iteration(0.0, 0))


@pytest.mark.parametrize("seed", range(5))
def test_covered_time_matches_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    intervals = [(start, start + rng.randint(0, 8)) for start in (rng.randint(0, 60) for _ in range(12))]
    slow = sum(any(start <= moment < end for start, end in intervals) for moment in range(80))
    assert trace.covered(intervals) == slow


@pytest.mark.parametrize("seed", range(5))
def test_overlapping_time_counts_for_the_earliest_kernel(seed: int) -> None:
    rng = random.Random(seed)
    names = ["_small_gemm_kernel", "flash::fwd", "_norm_kernel", "_row_kernel"]
    events = [event(rng.choice(names), start, rng.randint(0, 8), "kernel") for start in rng.sample(range(60), 12)]
    slow = dict.fromkeys((*trace.KINDS, trace.OTHER_KIND), 0)
    for moment in range(80):
        running = [e for e in events if e["ts"] <= moment < e["ts"] + e["dur"]]
        if running:
            slow[trace.kind(min(running, key=lambda e: e["ts"])["name"])] += 1
    assert trace.alone(events) == slow
    assert sum(slow.values()) == trace.covered((e["ts"], e["ts"] + e["dur"]) for e in events)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("_merge_kernel", "attention"),
        ("nvjet_sm90_tss_128x64_64x8_1x2_h_bx_splitK_TNT", "GEMMs"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "GEMMs"),
        ("_small_gemm_kernel", "GEMMs"),
        ("_rope_kernel", "norms, positions"),
        ("Memcpy DtoH (Device -> Pinned)", trace.OTHER_KIND),
    ],
)
def test_kernels_are_classified_by_name(kernel: str, kind: str) -> None:
    assert trace.kind(kernel) == kind


# ---- tables


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": MACHINE, "rows": [row | MADE for row in rows]}


def served(**row: Any) -> dict[str, Any]:
    figures = {"output_throughput": 400.0, "mean_ttft_ms": 20.0, "mean_tpot_ms": 2.5, "accept_length": 2.5, "roof_share": 0.8}
    return {"model": "m", "backend": "fa3", "overlap": "on", "concurrency": 1, **figures, **row}


def test_figures_have_significant_digits() -> None:
    assert [cell(value) for value in (None, 4.756, 123.45, 4417.2, "x", 3)] == ["-", "4.76", "123.5", "4417", "x", "3"]
    assert (percent(0.814), change(105.0, 100.0), change(None, 1.0)) == ("81 %", "+5.0 %", "-")
    assert table(["a", "b"], [["x", 1.0]]) == "| a | b |\n| --- | ---: |\n| x | 1.00 |"


def test_matrix_shows_peers_of_the_same_machine_only() -> None:
    rows = [served(mode="plain", concurrency=1), served(mode="eagle", concurrency=1, output_throughput=406.35)]
    text = serving_matrix.render(result(rows))
    assert "SGLang 0.5.17, fa3 | 209 / 27.5 / 4.76" in text
    assert "1.050x" in text, "406.35 against vLLM's 387"
    elsewhere = serving_matrix.render(result(rows) | {"machine": MACHINE | {"gpus": ["NVIDIA H100"], "device": "NVIDIA H100"}})
    assert "SGLang" not in elsewhere


def test_graph_table_has_off_on_and_change_rows() -> None:
    rows = [served(graph="off"), served(graph="on", output_throughput=440.0, mean_tpot_ms=2.25)]
    text = draft_extend_graph.render(result(rows))
    assert "| 1 | **change** | +10.0 % | +0.0 % | -10.0 % | +10.0 % | +0.0 % | - |" in text


def test_change_has_a_standard_error_if_rounds_exist() -> None:
    off, on = ({"by_round": {"mean_tpot_ms": of}} for of in ([2.0, 4.0, 2.0, 4.0], [1.8, 4.4, 1.8, 4.4]))
    text = draft_extend_graph.render(result([served(graph="off", **off), served(graph="on", mean_tpot_ms=2.25, **on)]))
    # Ratios 0.9, 1.1, 0.9, 1.1: a deviation of 0.2 / sqrt(3), over sqrt(4) rounds.
    assert "| +0.0 % | -10.0 % ± 5.8 | +0.0 % |" in text, "a column without rounds has no error"
    assert draft_extend_graph.standard_error(served(**on), served(**off), "mean_ttft_ms") is None
    assert draft_extend_graph.standard_error(*[{"by_round": {"mean_tpot_ms": [2.0]}}] * 2, "mean_tpot_ms") is None


def test_graph_table_lists_hidden_launches() -> None:
    def timed(concurrency: int, graph: str, iteration_us: float) -> dict[str, Any]:
        return served(concurrency=concurrency, graph=graph, iteration_us=iteration_us, draft_extend_gpu_us=90.0, draft_extend_host_us=40.0)

    took = {1: (200.0, 150.0), 4: (200.0, 192.0), 16: (300.0, 303.0)}
    rows = [timed(c, graph, us) for c, pair in took.items() for graph, us in zip(("off", "on"), pair, strict=True)]
    text = draft_extend_graph.render(result(rows))
    assert "iteration, GPU (µs) | draft-extend, GPU (µs) | draft-extend, host (µs) |" in text
    assert "Hidden at concurrency 4, 16: " in text, "a quarter of the iteration at 1 is not"
    assert "in at most 4.0 % of an iteration." in text
    assert "Hidden" not in draft_extend_graph.render(result(rows[:2]))
    assert "Hidden" not in draft_extend_graph.render(result([served(graph="off"), served(graph="on")])), (
        "nothing is said of what was not timed"
    )


def test_phases_are_timed_between_consecutive_iterations_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: clock[0])

    class Drafter:
        def propose(self) -> None:
            clock[0] += 0.002

        def follow(self) -> str:
            clock[0] += 0.004
            return "done"

        def follow_prompt(self) -> None:
            self.follow()

    class Worker:
        def __init__(self) -> None:
            self.parts = SimpleNamespace(drafter=Drafter())

        def _iterate(self, batch: None, chunks: None, iteration: None) -> str:
            self.parts.drafter.propose()
            return self.parts.drafter.follow()

    worker = Worker()
    alone, watched = phases.Phases(worker), phases.Phases(worker)
    with alone:
        assert worker._iterate(None, None, None) == "done"
        worker.parts.drafter.follow_prompt()
    assert alone.figures() == {}, "there are no two consecutive iterations"
    with watched:
        for _ in range(3):
            worker._iterate(None, None, None)
    assert vars(worker) == {"parts": worker.parts}, "the worker is as it was"
    assert vars(worker.parts.drafter) == {}
    worker._iterate(None, None, None)
    assert watched.figures() == pytest.approx({"draft_decode_host_us": 2000, "draft_extend_host_us": 4000, "draft_host_us": 6000})


def test_alternating_runs_are_balanced_and_merged() -> None:
    turns = draft_extend_graph.turns(4)
    assert turns == ["off", "on", "on", "off", "off", "on", "on", "off"]
    quick, slow = Served(1.0, 30, [0.1], [0.001]), Served(2.0, 30, [0.3, 0.5], [0.003, 0.005])
    figures = Served.together([quick, slow]).figures()
    assert (figures["duration"], figures["output_throughput"]) == (3.0, 20.0)
    assert (figures["mean_ttft_ms"], figures["median_tpot_ms"]) == (pytest.approx(300), pytest.approx(3)), "of requests, not of runs"


def test_graph_table_columns() -> None:
    kinds = {f"{kind}_{name}_ms": at for at, (name, kind) in enumerate(itertools.product(("ttft", "tpot"), ("mean", "median", "p99")), 1)}
    rows = [served(graph="on", concurrency=4, input_len=1000, output_len=500, **kinds), served(model="other", graph="on")]
    full, short = draft_extend_graph.render(result(rows)).split("**other, ")
    names = (
        "input_throughput | output_throughput | mean_ttft_ms | median_ttft_ms | p99_ttft_ms | mean_tpot_ms | median_tpot_ms | p99_tpot_ms"
    )
    assert f"| max_concurrency | draft-extend graph | {names} | per_user_throughput |" in full
    assert "| 4 | on | 800.0 | 400.0 | 1 | 2 | 3 | 4 | 5 | 6 | 100.0 |" in full, "400 output tokens are 800 input tokens and 100 per user"
    assert not [name for name in ("median", "p99", "input") if name in short], "columns without values are omitted"


@pytest.mark.parametrize("gemms", ["GEMMs", "products"])
def test_parts_above_the_roof_add_up_to_the_step(gemms: str) -> None:
    spent = {gemms: 3700.0, "attention": 250.0, "norms, positions": 120.0, trace.OTHER_KIND: 60.0}
    row = served(mode="plain", graphs="on", batch=1, step_ms=4.2, idle=0.1, traced_idle=0.1, busy_ms=4.13, kernels=300.0, spent_us=spent)
    known = row | {"roof_ms": 3.5, "weights_ms": 3.47}
    lost = modes.above_roof(known)
    assert lost == pytest.approx({"GEMMs": 230, "attention": 220, "norms, positions": 120, trace.OTHER_KIND: 60, modes.IDLE: 70})
    assert sum(lost.values()) + 3500 == pytest.approx(4200)
    assert "| m, plain, fa3, batch 1 | 4200 | 3500 | 230.0 | 220.0 | 120.0 | 60.00 | 70.00 |" in modes.render(result([known]))
    assert modes.above_roof(row) is None
    assert "above the roof" not in modes.render(result([row])), "no roof without a measured bandwidth"


def test_step_roof_counts_weights_and_kv() -> None:
    served_model = shapes.big_model()
    assert served_model.shape is not None
    found = modes.roof(served_model, "plain", {"batch": 32, "context": 1000}, 4.32e12)
    assert found["weights_ms"] == pytest.approx(15.01e9 / 4.32e9, rel=1e-3)
    assert found["roof_ms"] - found["weights_ms"] == pytest.approx(32 * 1000 * 131072 / 4.32e9)
    assert modes.roof(shapes.named_model("m", "h"), "plain", {"batch": 1, "context": 1}, 4.32e12) == {"roof_ms": None, "weights_ms": None}


def test_crossover_is_where_the_ratio_crosses_one() -> None:
    assert crossover.crossing([(1, 1.5), (4, 1.25), (16, 0.75)]) == pytest.approx(8.0)
    assert crossover.crossing([(1, 1.5), (4, 1.25)]) is None
    rows = [served(speculation=s, text="random", concurrency=c, output_throughput=t) for s, c, t in
            (("off", 1, 100.0), ("off", 4, 400.0), ("2.5", 1, 150.0), ("2.5", 4, 360.0))]  # fmt: skip
    assert crossover.ratios(rows, "2.5", "random") == [(1, 1.5), (4, 0.9)]
    longer = [row | {"output_len": 64 if row["speculation"] == "off" else 256} for row in rows]
    assert crossover.ratios(longer, "2.5", "random") == [], "the answers have other lengths"


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([1.2, 1.1], "above 1 up to 4"),
        ([0.9, 0.8], "below 1 from 1 on"),
        ([0.9, 1.1], "below 1 at 1, above 1 at 4"),
        ([1.25, 0.75], "2.00"),
    ],
)
def test_crossover_says_on_which_side_of_one_the_ratios_are(ratios: list[float], text: str) -> None:
    rows = [served(speculation=s, text="random", concurrency=c, output_throughput=r) for c, r in zip((1, 4), ratios, strict=True)
            for s, r in (("off", 1.0), ("2.5", r))]  # fmt: skip
    assert f"| {text} |" in crossover.summary(result([row | {"total_output_tokens": 9} for row in rows]))


def test_crossover_table_shows_real_and_synthetic_acceptance() -> None:
    rows = [
        served(speculation=s, text=x, concurrency=c, output_throughput=t, accept_length=a, total_output_tokens=n)
        for s, x, c, t, a, n in (
            ("off", "random", 1, 100.0, None, 64), ("off", "random", 4, 100.0, None, 64),
            ("off", "real", 1, 50.0, None, 300), ("off", "real", 4, 50.0, None, 300),
            ("2.5", "random", 1, 150.0, 2.5, 64), ("2.5", "random", 4, 120.0, 2.5, 64),
            ("real", "real", 1, 60.0, 2.0, 300), ("real", "real", 4, 30.0, 4.0, 300),
        )
    ]  # fmt: skip
    text = crossover.render(result(rows))
    assert "| real, real text | 2.67 | 1.20 | 0.60 | 1.59 |" in text, "300 tokens of 2.0 and 300 of 4.0 in 225 windows; 2^(2/3)"
    assert "| synthetic 2.5, random text | 2.50 | 1.50 | 1.20 | above 1 up to 4 |" in text
    assert "as many tokens without drafts as with them at every concurrency" in text
    assert "300 and 299 at c=4; equal elsewhere" in crossover.render(result([*rows[:-1], rows[-1] | {"total_output_tokens": 299}]))


@pytest.mark.parametrize("asked", [5, 6, 13])
def test_chat_text_sends_every_prompt_equally_often(asked: int) -> None:
    burst = chat_text(2, asked, 16, 6)
    lines = Path(burst.flags[burst.flags.index("--dataset-path") + 1]).read_text().splitlines()
    times = {line: lines.count(line) for line in lines}
    assert (len(times), set(times.values())) == (6, {-(-asked // 6)})
    assert burst.labels["num_prompts"] == len(lines) == int(burst.flags[burst.flags.index("--num-prompts") + 1])
    kinds = {line["prompt"]: line["kind"] for line in embedded_prompts()}
    assert len({kinds[json.loads(line)["prompt"]] for line in times}) == 6


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_standard_error_matches_its_definition(seed: int) -> None:
    draw = random.Random(seed)
    accepted = [draw.randrange(verify_exact.STEPS + 1) for _ in range(500)]
    length = 1 + sum(accepted) / 500
    shares = [sum(n > i for n in accepted) / 500 for i in range(verify_exact.STEPS)]
    row = {"accept_length": length, "per_position_acceptance": shares, "completed": 7, "total_output_tokens": 7 + 500 * length}
    expected = statistics.pstdev(n / verify_exact.STEPS for n in accepted) / 500**0.5
    assert verify_exact.standard_error(row) == pytest.approx(expected)
    assert verify_exact.standard_error(row | {"per_position_acceptance": None}) is None


def test_spread_is_relative_to_the_median() -> None:
    runs = [dict.fromkeys(client_agreement.FIGURES, value) | {"accept_length": 2.5} for value in (100.0, 96.0, 102.0)]
    runs[0]["median_itl_ms"] = None
    found = repeat.spread(runs)
    assert found["mean_ttft_ms"] == pytest.approx(-4.0)
    assert found["median_itl_ms"] is None
    assert repeat.farthest(found) == pytest.approx(-4.0)
    text = repeat.render(
        result([served(mode="eagle", input_len=1000, output_len=256, runs=[*runs, runs[0] | {"accept_length": 2.6}], spread=found)])
    )
    assert "| **-4.00** | 4 | 2.500, 2.600 |" in text, "different accept lengths are shown"


def test_profile_table_shows_saved_host_time() -> None:
    base = {"period_us": 200.0, "gpu_busy_us": 150.0, "gpu_us": {"verify": 100.0}, "kernels": 9.0, "launches": 9.0, "graph_launches": 0.0}
    base |= {"copies": 1.0}
    eager = served(graphs="eager", host_us={"draft_decode": 60.0, "draft_extend": 40.0}, **base)
    both = served(graphs="both", host_us={"draft_decode": 15.0, "draft_extend": 10.0}, **base)
    text = step_profile.render(result([eager, both]))
    assert "| host: both draft phases (µs) | 100.0 | 25.00 (-75 %) |" in text
    alone = [
        {"step_us": 190.0, "draft_decode_host_us": d, "draft_extend_host_us": e, "draft_host_us": d + e}
        for d, e in ((50.0, 30.0), (10.0, 9.0))
    ]
    text = step_profile.render(result([eager | alone[0], both | alone[1]]))
    cuts = {"draft-decode": "50.00 | 10.00 (-80 %)", "draft-extend": "30.00 | 9.00 (-70 %)", "both draft phases": "80.00 | 19.00 (-76 %)"}
    assert all(f"| host: {name}, no profiler (µs) | {cut} |" in text for name, cut in cuts.items())
    assert "| GPU idle | 25.0 % | 25.0 % |" in text


def test_clients_alternate_and_are_compared_by_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"ours": iter([100.0, 110.0, 500.0, 103.0, 99.0, 103.0]), "theirs": iter([100.0, 90.0, 100.0])}
    order: list[str] = []

    def run(self: client_agreement.Client, flags: list[str], requests: int) -> dict[str, float]:
        order.append(self.name)
        return dict.fromkeys(client_agreement.FIGURES, next(took[self.name]))

    monkeypatch.setattr(client_agreement.Client, "run", run)
    ours, theirs = (client_agreement.Client(name, (), {}) for name in ("ours", "theirs"))
    found = client_agreement.compare(ours, theirs, [], 1, 3)
    assert order == ["ours", "ours", "theirs", "ours", "theirs", "ours", "theirs", "ours", "ours"]
    # ours: 100, 103, 99; again: 110, 500, 103; theirs: 100, 90, 100
    assert set(found["difference"].values()) == {0.0}
    assert list(found["repeat"].values()) == pytest.approx([(100 / 110 - 1) * 100] * len(client_agreement.FIGURES))
    row = {"server": "s", "backend": "b", "load": "l", "client": "SGLang 1", **found}
    text = client_agreement.render(result([row]))
    assert "against the client of SGLang 1" in text
    assert "| s; b, l | -9.09 |" in text
    alone = client_agreement.render(result([row | {"client": None, "difference": None}]))
    assert "against the client" not in alone


def test_acceptance_rate_excludes_the_bonus_token() -> None:
    assert verify_exact.acceptance_rate({"accept_length": 2.5}) == pytest.approx(0.5)
    assert verify_exact.acceptance_rate({"accept_length": None}) is None


# ---- the report


def page(body: str = "typed by hand\n", name: str = "serving_matrix") -> str:
    return f"# T\n<!-- begin:{name} -->\n{body}<!-- end:{name} -->\nrest\n"


def test_only_text_between_markers_changes(tmp_path: Path) -> None:
    file = tmp_path / "nvidia-h200" / "serving_matrix.json"
    file.parent.mkdir()
    file.write_text(json.dumps(result([served(mode="plain")])))
    filled = report.fill(page(), tmp_path, tmp_path)
    assert "typed by hand" not in filled
    assert "Plain decoding" in filled
    assert filled.startswith("# T\n<!-- begin:serving_matrix -->\n")
    assert filled.endswith("<!-- end:serving_matrix -->\nrest\n")
    assert report.fill(filled, tmp_path, tmp_path) == filled
    assert report.fill(page(name="serving_matrix@nvidia-h200"), tmp_path, tmp_path).count("Plain decoding") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (page(name="guesses"), "no such benchmark"),
        (page(name="capture:chart"), "the forms are 'summary' and 'plot'"),
        ("<!-- begin:capture -->\n", "without an end"),
    ],
)
def test_unknown_marker_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match=why):
        report.fill(text, tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["serving_matrix", "serving_matrix@nvidia-h100"])
def test_missing_result_file_gives_no_figures(name: str, tmp_path: Path) -> None:
    filled = report.fill(page(name=name), tmp_path, tmp_path)
    assert "typed by hand" not in filled
    assert "Not measured yet: `python -m benchmark.serving_matrix`" in filled


def test_documented_mixed_chunk_changes_match_the_results() -> None:
    folder = RESULTS / "nvidia-h200" / "mixed_chunk"
    mixed, without = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("serving_matrix.json", "without.json"))
    assert mixed["machine"] == without["machine"]
    commits = [{row["commit"] for row in matrix["rows"]} for matrix in (mixed, without)]
    assert commits == [{"6995b2c82f76"}, {"023026928fec"}]

    def changes(figure: str) -> dict[tuple[str, int], float]:
        rows = zip(mixed["rows"], without["rows"], strict=True)
        assert all(a["server_flags"] == b["server_flags"] and a["num_prompts"] == b["num_prompts"] for a, b in rows)
        both = [{(row["mode"], row["concurrency"]): row[figure] for row in matrix["rows"]} for matrix in (mixed, without)]
        return {key: round(100 * (both[0][key] / both[1][key] - 1)) for key in both[0]}

    assert max(map(abs, changes("output_throughput").values())) <= 3
    later = {("eagle", 4): 52, ("eagle", 16): 17, ("eagle", 32): 10, ("plain", 4): 4, ("plain", 16): -21, ("plain", 32): -29}
    assert changes("mean_ttft_ms") == later | {("eagle", 1): 0, ("plain", 1): 2}


def test_committed_pages_equal_what_the_report_generates() -> None:
    assert report.main(["--check"]) == 0
    assert sorted(report.PAGES.iterdir()) == sorted(report.script_pages()), "a page per script and no other file"


def test_a_summary_has_no_provenance_and_links_to_the_page(tmp_path: Path) -> None:
    file = tmp_path / "nvidia-h200" / "serving_matrix.json"
    file.parent.mkdir()
    file.write_text(json.dumps(result([served(mode="plain")])))
    filled = report.fill(page(name="serving_matrix:summary"), report.ROOT / "docs", tmp_path)
    assert "Plain decoding" in filled
    assert "abc" not in filled, "the commit"
    assert "](benchmarks/serving_matrix.md)\n<!-- end" in filled
    plot = report.render("serving_matrix@nvidia-h200:plot", tmp_path, report.ROOT)
    assert re.fullmatch(r"\[!\[serving matrix, nvidia-h200]\(.*serving_matrix\.png\)]\(docs/benchmarks/serving_matrix\.md\)\n", plot)


@pytest.mark.parametrize("script", report.SCRIPTS)
def test_every_figure_of_a_summary_is_on_the_page(script: str) -> None:
    summary, whole = (report.render(f"{script}{form}", RESULTS, report.PAGES) for form in (":summary", ""))
    figures = {form: set(re.findall(r"\d+\.\d+", text)) for form, text in (("summary", summary), ("whole", whole))}
    assert figures["summary"] <= figures["whole"]


def test_check_fails_on_a_stale_table_without_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "serving_matrix.json").write_text(json.dumps(result([served(mode="plain")])))
    readme = tmp_path / "README.md"
    readme.write_text(page())
    flags = [str(readme), "--results", str(tmp_path)]
    assert report.main([*flags, "--check"]) == 1
    assert readme.read_text() == page()
    assert report.main(flags) == 0
    assert report.main([*flags, "--check"]) == 0
    assert "differs" in capsys.readouterr().out


def test_everyday_prompts_alternate_between_kinds_and_have_rows_of_their_own() -> None:
    lines = embedded_speculation.everyday_prompts()
    count = len({line["kind"] for line in lines})
    assert len({line["kind"] for line in lines[:count]}) == count >= 16
    row = {"device": "cpu", "dtype": "float32", "quantization": "int8", "batch": 1}
    assert list(embedded_speculation.kinds([row, row | {"text": "everyday"}])) == ["cpu, int8", "cpu, int8, everyday prompts"]


# ---- draft heads


def test_rows_of_another_draft_head_say_so(tmp_path: Path) -> None:
    rows = [{"shape": "off"}, {"shape": "3/1/4", **draft_head.label()}]
    assert draft_head.note(rows) == ""
    rows.append({"shape": "4/1/5", "draft_head": "0" * 12})
    assert draft_head.note(rows) == draft_head.EARLIER
    assert draft_head.label(tmp_path) == {}, "random weights have no digest"


def test_tables_of_another_draft_head_say_so() -> None:
    shown = report.render("verify_exact@nvidia-h200:summary", RESULTS, report.ROOT)
    heads = {row.get("draft_head") for row in json.loads((RESULTS / "nvidia-h200" / "verify_exact.json").read_text())["rows"]}
    assert (draft_head.EARLIER in shown) == (heads != {draft_head.label()["draft_head"]})
