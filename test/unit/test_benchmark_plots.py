"""Plots of the benchmark package: panels per script, deterministic PNG files, and missing or stale plots."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmark import crossover, depth_curve, draft_extend_graph, exactness, grammar, picture, plots, report, serving_matrix, step_profile
from benchmark.client_agreement import FIGURES
from benchmark.record import Record
from matplotlib.figure import Figure

MACHINE = {"device": "NVIDIA H200", "gpus": ["NVIDIA H200"], "cpu": "x", "cores": 16, "python": "3.12", "packages": {"torch": "2.11.0"}}
MAX_BYTES = 100_000


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": MACHINE, "rows": [row | {"commit": "abc", "command": "python -m benchmark.x"} for row in rows]}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The title and the panels of the last plot, which is not drawn."""
    seen: dict[str, Any] = {}

    def draw(result: object, file: Path, title: str, panels: list[plots.Panel], columns: int = 1) -> None:
        seen.update(title=title, panels=panels)

    monkeypatch.setattr(picture, "draw", draw)
    return seen


# ---- panels


@pytest.mark.parametrize("panel", [plots.bars({}, "t", "ms"), plots.stacks({}, "t", "ms"), plots.lines({}, "t", "x", "y", 1.0)])
def test_panel_without_rows_is_empty(panel: plots.Panel, tmp_path: Path) -> None:
    picture.draw(result([]), tmp_path / "x.png", "nothing yet", [panel])
    assert (tmp_path / "x.png").is_file()


def test_a_plot_of_a_quick_run_is_composed_but_not_written(tmp_path: Path) -> None:
    painted: list[str] = []
    panel = plots.Panel(["a"], 2.0, lambda axes, colours: painted.extend(colours))
    quick = Record("x", ("mode",), tmp_path, quick=True)
    picture.draw(quick.data, tmp_path / "x.png", "nothing", [panel])
    assert painted == ["a"]
    assert not (tmp_path / "x.png").exists()


# ---- what scripts show


def served(**row: Any) -> dict[str, Any]:
    figures = {"output_throughput": 400.0, "mean_ttft_ms": 20.0, "mean_tpot_ms": 2.5, "accept_length": 2.5, "total_output_tokens": 1000}
    return {"model": "m", "backend": "fa3", "overlap": "on", "concurrency": 1, **figures, **row}


def test_graph_plot_has_a_panel_per_series(drawn: dict[str, Any]) -> None:
    kinds = [(model, backend, overlap) for model in ("a", "b") for backend in ("fa3", "flashinfer") for overlap in ("on", "off")]
    rows = [served(model=m, backend=b, overlap=o, concurrency=c, graph=g) for m, b, o in kinds for c in (1, 16) for g in ("off", "on")]
    draft_extend_graph.plot(result([*rows, served(model="alone", graph="on")]), Path("x.png"))
    assert drawn["title"] == "Draft-extend graph off and on: a, b, alone"
    assert [list(panel.names) for panel in drawn["panels"]] == [["graph off", "graph on"]] * len(kinds)


def test_a_fixed_depth_at_another_acceptance_takes_as_long_for_prompts() -> None:
    """Two waves: 0.5 s of prompts each, and 1 s of iterations in all. Measured throughput replaces the estimate."""
    row: dict[str, Any] = {"speculation": "K=1", "acceptance": "2.5", "concurrency": 8, "num_prompts": 16, "output_len": 100}
    row |= {"duration": 2.0, "p99_ttft_ms": 500.0, "output_throughput": 800.0, "steps_by_depth": {"1": 90, "3": 0}}
    slower = depth_curve.expected(1, "2.5") / depth_curve.expected(1, "1.2")
    assert depth_curve.estimate(row, "1.2") == pytest.approx(1600 / (1.0 + slower))
    assert depth_curve.estimate(row, "2.5") == pytest.approx(800.0)
    rows = [row, {**row, "acceptance": "1.2", "output_throughput": 500.0}]
    assert depth_curve.curves(rows, "1.2") == depth_curve.curves(rows[::-1], "1.2") == {"K=1": [(8, 500.0)]}


def test_crossover_plot_has_a_line_per_accept_length(drawn: dict[str, Any]) -> None:
    ratios = {"2.5": {1: 1.5, 4: 1.25, 16: 0.75}, "3.5": {1: 2.0, 4: 1.5, 16: 1.1}}
    rows = [served(speculation="off", text="random", concurrency=c, output_throughput=100.0) for c in (1, 4, 16)]
    rows += [
        served(speculation=s, text="random", concurrency=c, output_throughput=100.0 * r) for s, by in ratios.items() for c, r in by.items()
    ]
    crossover.plot(result(rows), Path("x.png"))
    (panel,) = drawn["panels"]
    assert list(panel.names) == ["m, synthetic 2.5, random text", "m, synthetic 3.5, random text"]


@pytest.mark.parametrize(("ranks", "title"), [({}, "Plain decoding"), ({"tp_size": 2}, "Plain decoding, on 2 GPUs")])
def test_serving_plot_names_its_gpus(ranks: dict[str, int], title: str, drawn: dict[str, Any]) -> None:
    serving_matrix.plot(result([served(mode="plain", **ranks)]), Path("x.png"))
    (panel,) = drawn["panels"]
    axes = Figure().subplots()
    panel.paint(axes, dict.fromkeys(panel.names, "black"))
    assert axes.get_title() == title


def test_profile_plot_shows_host_gpu_and_unprofiled_times(drawn: dict[str, Any]) -> None:
    row = served(graphs="eager", host_us={"draft_extend": 40.0, "draft_decode": 60.0}, gpu_us={"verify": 90.0, "other": 10.0})
    step_profile.plot(result([row | {"step_us": 200.0, "draft_host_us": 70.0}]), Path("x.png"))
    assert [list(panel.names) for panel in drawn["panels"]] == [
        ["draft-decode", "draft-extend"],
        ["verify", "other"],
        ["whole iteration", "draft phases, host"],
    ]


def graph(runner: str) -> dict[str, Any]:
    return {"runner": runner, "sizes": [1, 2], "seconds": 0.5, "reserved_mib": 100.0, "used_mib": 90.0}


GOOD = {"lost": 0, "leaked_pages": 0, "p50_s": 20.0, "p99_s": 30.0}
GROWTH = {"first_mib": 130.0, "last_mib": 140.0, "slope_mib_per_hour": 0.5}

CHECKOUT = {"ready_seconds": 9.0, "graphs_mib": 700.0, "runs": {"1": {"output_throughput": 400.0}}}

ROWS: dict[str, list[dict[str, Any]]] = {
    "serving_matrix": [served(mode=mode, server_flags="--model-path a/b") for mode in ("plain", "eagle")],
    "draft_extend_graph": [
        served(model=m, backend=b, overlap=o, concurrency=c, graph=g)
        for m in ("llama-3-8b", "SmolLM2", "third")
        for b in ("fa3", "flashinfer")
        for o in ("on", "off")
        for c in (1, 4, 16, 32, 64)
        for g in ("off", "on")
    ],
    "step_profile": [
        served(overlap=o, graphs=g, host_us={"verify": 1.0}, gpu_us={"verify": 2.0}) for o in ("on", "off") for g in step_profile.GRAPHS
    ],
    "depth_curve": [
        served(speculation=s, acceptance=a, concurrency=c, input_len=128, output_len=128, steps_by_depth={"3": 100, "1": 4, "0": 0})
        | {"num_prompts": 2 * c, "duration": 1.0, "p99_ttft_ms": 50.0}
        for s, a in (("off", None), ("auto", "1.2"), ("auto", "2.5"), ("K=3", "2.5")) for c in (1, 4)
    ],
    "workloads": [
        *(served(mode=m, workload=w) for m in ("plain", "auto") for w in ("1000 → 1000, c=1", "x")),
        *(served(mode=m, workload="8 requests/s", request_rate=8.0, p99_tpot_ms=9.0, p99_ttft_ms=90.0) for m in ("plain", "auto")),
    ],
    "cached_states": [served(cache=cache, load=load) for cache in ("on", "off") for load in ("2000 shared + 200 → 200, c=32", "x")],
    "crossover": [served(speculation=s, text="random", concurrency=c) for s in ("off", "2.5", "real") for c in (1, 4)],
    "capture": [
        {"mode": "plain", "backend": "fa3", "ready_seconds": 9.0, "startup_seconds": {"load_weights": 2.0}, "graphs": [graph("verify")]},
        {"mode": "eagle", "backend": "torch_native", "ready_seconds": 3.0, "startup_seconds": None, "graphs": None},
    ],
    "verify_exact": [
        {"model": "m", "rule": "strict", "accept_length": 1.5, "per_position_acceptance": [0.4, 0.2]},
        {"model": "m", "rule": "eager", "accept_length": None, "per_position_acceptance": None},
    ],
    "cpu_serving": [
        {"system": "Talon", "quantization": "int8", "batch": 1, "tokens_per_second": 20.0},
        {"system": "Talon", "quantization": "none", "batch": 8, "tokens_per_second": None},
    ],
    "faults": [{"what": "queue full", "value": 1.0, "bound": 20.0, "unit": "ms"}],
    "abuse": [
        {"neighbours": who, "health_p50_ms": 1.0, "health_p99_ms": 9.0, "health_most_ms": 10.0, "ttft_p50_ms": 50.0, "ttft_p99_ms": late}
        | {"good_requests": 100, "failed": 0}
        for who, late in (("well-behaved", 90.0), ("worst requests", 150.0))
    ],
    "storm": [
        {"phase": phase, "minutes": 12.0, "clients": 64, "requests": 900} | GOOD | more
        for phase, more in (("calm", {"memory": {"http": GROWTH}}), ("kills, one rank", {}))
    ],
    "client_agreement": [
        {"server": "mock", "backend": "vllm", "load": "4 at a time", "difference": {"mean_ttft_ms": -0.4}, "repeat": {"mean_itl_ms": None}},
        {"server": "mock", "backend": "vllm", "load": "6 a second", "difference": None, "repeat": {"mean_ttft_ms": 1.5}},
    ],
    "repeat": [
        served(mode="eagle", input_len=1000, output_len=n, spread=dict.fromkeys(FIGURES, -1.5) | {"median_itl_ms": None}) for n in (64, 256)
    ],
    "modes": [served(mode="plain", graphs="on", batch=1, step_ms=4.0)],
    "sampling": [
        served(mode="eagle", choice="greedy", sampler=None, batch=1, step_ms=5.0),
        served(mode="eagle", choice="temperature 0.8", sampler="triton", batch=1, step_ms=5.5),
    ],
    "ragged_windows": [{"model": "m", "batch": b, "full_ms": 6.0, "ragged_ms": 5.5} for b in (32, 64)],
    "embedded_gpu": [{"system": "transformers", "dtype": "bfloat16", "tokens_per_second": 30.0}],
    "embedded_speculation": [
        {"device": "cpu", "dtype": "float32", "quantization": "int8", "speculation": s, "batch": b, "tokens_per_second": 1.0} | text
        for s in ("off", "3/1/4") for b in (1, 2) for text in ({}, {"text": "everyday"})
    ],
    "tune_grid": [
        {"model": "embedded", "device": "cpu", "shape": s, "batch": b, "tokens_per_second": 30.0 * b, "chosen": "chosen: 3/1/4"}
        for s in ("off", "3/1/4", "tuned") for b in (1, 4)
    ],
    "lossless": [{"shape": "3/1/4", "dtype": "float32", "prompts": 8, "accept_length": 2.0, "differences": []}],
    "drift_alarm": [
        {"kind": "simulation", "fault": f, "requests": b, "draft": 0.15, "rates": [0.4, 0.1], "median": 20.0, "p90": 30.0}
        | {"missed": 0, "runs": 2}
        for f in ("slots off by one", "5 points") for b in (1, 32)
    ],
    "host_cost": [
        {"process": p, "requests": n, "drafts": 3, "checkout": c, "us": 3.0, "parts": {"plan": 0.2} if p == "scheduler" else None}
        for p in ("scheduler", "http") for n in (1, 256) for c in ("base", "this")
    ],
    "compare_commits": [{"mode": "plain", "backend": "fa3", "old": [CHECKOUT], "new": [CHECKOUT]}],
    "grammar": [
        {"what": w, "speculation": "3/1/4", "batch": 16, "tokens_per_second": 30.0, "accept_length": 2.0} for w in ("free", "schema")
    ] + [{"what": "acceptance", "grammar": g, "speculation": "3/1/4", "batch": 4, "accept_length": 2.1} for g in grammar.CONSTRAINTS],
    "moe_kernels": [{"shape": s, "rows": r, "roof_share": 0.8} for s in ("qwen3-30b-a3b", "gpt-oss-20b") for r in (1, 16, 8192)],
    "exchanges": [
        {"ranks": n, "exchange": name, "rows": r, "columns": 8192, "bytes": 16384 * r, "us": 2.0 * r, "nccl_us": 5.0 * r, "gb_per_s": 9.0}
        for n in (2, 4) for name in ("sum", "gather") for r in (1, 64)
    ],
    "model_matrix": [
        {"model": "gpt-oss-20b", "mode": mode, "concurrency": c, "input_len": 1000, "output_len": 300, "output_throughput": 90.0 * c}
        | {"server_flags": "--model-path x"}
        for mode in ("plain", "accept-2.5")
        for c in (1, 16)
    ],
    "exactness": [
        {"model": "8b", "setting": s, "context": 1000, "requests": n, "width": w, "ms": 4.0, "differ": 1, "tokens": 4 * n}
        for s in exactness.SETTINGS for n, w in exactness.PASSES
    ] + [
        {"model": "smollm2", "setting": "EAGLE 3/1/4 against plain", "requests": 1, "prompts": 64, "tokens": 900, "accept_length": 2.0}
        | {"differences": [{"prompt": 3, "token": 9}]}
    ],
    "memory_limits": [{"case": "8b-plain", "unused": 0.01, "graphs": [graph("target decode")]}, {"case": "bad", "error": "out of memory"}],
}  # fmt: skip


@pytest.mark.parametrize("script", report.SCRIPTS)
def test_every_script_draws_a_small_plot(script: str, tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    importlib.import_module(f"benchmark.{script}").plot(result(ROWS[script]), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("script", ["serving_matrix", "step_profile", "crossover"])
def test_each_kind_of_panel_is_drawn_the_same_again(script: str, tmp_path: Path) -> None:
    """Bars, stacks and lines; all scripts draw by the same function."""
    one, other = tmp_path / "1.png", tmp_path / "2.png"
    for file in (one, other):
        importlib.import_module(f"benchmark.{script}").plot(result(ROWS[script]), file)
    assert one.read_bytes() == other.read_bytes()


# ---- the report


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmark" / "results"
    for machine in ("nvidia-h200", "cpu-2"):
        (folder / machine).mkdir(parents=True)
        (folder / machine / "faults.json").write_text(json.dumps(result(ROWS["faults"])))
    return folder


def test_report_draws_plots_and_links_them_below_tables(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- begin:faults -->\n<!-- end:faults -->\n")
    assert report.main([str(page), "--results", str(results)]) == 0
    text = page.read_text()
    for machine in ("nvidia-h200", "cpu-2"):
        assert f"![faults, {machine}](../benchmark/results/{machine}/faults.png)\n" in text
        assert (results / machine / "faults.png").is_file()
    assert text.index("| queue full |") < text.index("![faults")
    assert report.main([str(page), "--results", str(results), "--check"]) == 0


def test_check_names_missing_and_stale_plots(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = results / "page.md"
    page.write_text("<!-- begin:faults@cpu-2 -->\n<!-- end:faults@cpu-2 -->\n")
    flags = [str(page), "--results", str(results)]
    report.main(flags)
    (results / "cpu-2" / "faults.png").unlink()
    newer = result([*ROWS["faults"], ROWS["faults"][0] | {"what": "another"}])
    (results / "nvidia-h200" / "faults.json").write_text(json.dumps(newer))
    capsys.readouterr()
    assert report.main([*flags, "--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{results / 'cpu-2' / 'faults.png'}: is missing" in lines
    assert f"{results / 'nvidia-h200' / 'faults.png'}: shows other rows than its result file" in lines
    assert not (results / "cpu-2" / "faults.png").exists()
    assert report.main(flags) == 0
    assert report.main([*flags, "--check"]) == 0


def test_missing_matplotlib_skips_the_plot_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    picture.draw(result([]), tmp_path / "x.png", "t", [])
    assert not (tmp_path / "x.png").exists()
    assert "matplotlib is not installed" in capsys.readouterr().out
