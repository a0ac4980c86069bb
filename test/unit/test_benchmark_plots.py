"""Plots of the benchmark folder: what bars and lines hold, pictures drawn from result files alone, and a check that finds lost ones."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmark import crossover, draft_extend_graph, picture, plots, report, step_profile
from benchmark.client_agreement import FIGURES
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MACHINE = {"device": "NVIDIA H200", "gpus": ["NVIDIA H200"], "cpu": "x", "cores": 16, "python": "3.12", "packages": {"torch": "2.11.0"}}
MOST_BYTES = 100_000


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": MACHINE, "rows": [row | {"commit": "abc", "command": "python -m benchmark.x"} for row in rows]}


def painted(panel: plots.Panel) -> Axes:
    axes = Figure().add_subplot()
    panel.paint(axes, dict.fromkeys(panel.names, "red"))
    return axes


def said(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The title and the panels of the last picture, which is not drawn."""
    seen: dict[str, Any] = {}

    def draw(result: object, file: Path, title: str, panels: list[plots.Panel], columns: int = 1) -> None:
        seen.update(title=title, panels=panels)

    monkeypatch.setattr(picture, "draw", draw)
    return seen


# ---- panels


def test_bars_have_the_lengths_of_their_values_and_none_for_what_was_not_measured() -> None:
    axes = painted(plots.bars({"1": {"off": 2.0, "on": 3.0}, "4": {"off": None, "on": 5.0}}, "t", "ms", kind="concurrency"))
    assert [bar.get_width() for bar in axes.patches] == [2.0, 3.0, 5.0]
    assert said(axes) == ["2.00", "3.00", "5.00"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "4"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("ms", "concurrency")
    assert axes.get_xlim()[1] > 5.0


def test_a_bound_is_drawn_within_the_axes() -> None:
    axes = painted(plots.bars({"a": {"unused": 0.5}}, "t", "per cent", bound=2.0))
    assert axes.lines[0].get_xdata()[0] == 2.0
    assert axes.get_xlim()[1] > 2.0


def test_stacked_parts_begin_where_the_last_ends_and_their_sum_stands_there() -> None:
    axes = painted(plots.stacks({"a": {"x": 10.0, "y": 5.0}, "b": {"y": 4.0}}, "t", "µs"))
    found = {(round(bar.get_x(), 3), round(bar.get_width(), 3)) for bar in axes.patches}
    assert found == {(0.0, 10.0), (0.0, 0.0), (10.0, 5.0), (0.0, 4.0)}
    assert [text for text in said(axes) if text not in ("10.00", "5.00", "4.00")] == ["15.00"]


@pytest.mark.parametrize("panel", [plots.bars({}, "t", "ms"), plots.stacks({}, "t", "ms"), plots.lines({}, "t", "x", "y", 1.0)])
def test_a_panel_without_rows_is_empty(panel: plots.Panel, tmp_path: Path) -> None:
    picture.draw(result([]), tmp_path / "x.png", "nothing yet", [panel])
    assert (tmp_path / "x.png").is_file()


# ---- what scripts show


def served(**row: Any) -> dict[str, Any]:
    figures = {"output_throughput": 400.0, "mean_ttft_ms": 20.0, "mean_tpot_ms": 2.5, "accept_length": 2.5, "total_output_tokens": 1000}
    return {"model": "m", "backend": "fa3", "overlap": "on", "concurrency": 1, **figures, **row}


def test_the_graph_plot_shows_off_against_on_for_every_series_and_concurrency(drawn: dict[str, Any]) -> None:
    kinds = [(model, backend, overlap) for model in ("a", "b") for backend in ("fa3", "flashinfer") for overlap in ("on", "off")]
    rows = [
        served(model=m, backend=b, overlap=o, concurrency=c, graph=g, output_throughput=100.0 * c * gain, mean_tpot_ms=2.0 / gain)
        for m, b, o in kinds
        for c in (1, 16)
        for g, gain in (("off", 1.0), ("on", 1.25))
    ]
    draft_extend_graph.plot(result([*rows, served(model="alone", graph="on")]), Path("x.png"))
    assert drawn["title"] == "Draft-extend graph off and on: a, b, alone"
    panels = [painted(panel) for panel in drawn["panels"]]
    assert [axes.get_title() for axes in panels] == [f"{m}, {b}, overlap {o}" for m, b, o in kinds]
    for axes in panels:
        assert said(axes) == ["100.0", "1600", "125.0 (+25.0 %; TPOT -20.0 %)", "2000 (+25.0 %; TPOT -20.0 %)"]


def test_the_crossover_is_marked_where_a_line_falls_through_one(drawn: dict[str, Any]) -> None:
    ratios = {"2.5": {1: 1.5, 4: 1.25, 16: 0.75}, "3.5": {1: 2.0, 4: 1.5, 16: 1.1}}
    rows = [served(speculation="off", text="random", concurrency=c, output_throughput=100.0) for c in (1, 4, 16)]
    rows += [
        served(speculation=s, text="random", concurrency=c, output_throughput=100.0 * r) for s, by in ratios.items() for c, r in by.items()
    ]
    crossover.plot(result(rows), Path("x.png"))
    axes = painted(drawn["panels"][0])
    assert said(axes) == ["8.0"]
    stars = [line for line in axes.lines if line.get_marker() == "*"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in stars] == [(pytest.approx(8.0), 1.0)]


def test_the_profile_plot_stacks_phases_for_host_and_gpu_and_shows_the_step_without_a_profiler(drawn: dict[str, Any]) -> None:
    row = served(graphs="eager", host_us={"draft_extend": 40.0, "draft_decode": 60.0}, gpu_us={"verify": 90.0, "other": 10.0})
    step_profile.plot(result([row | {"step_us": 200.0, "draft_host_us": 70.0}]), Path("x.png"))
    host, gpu, alone = drawn["panels"]
    assert (host.names, gpu.names) == (["draft-decode", "draft-extend"], ["verify", "other"])
    assert "100.0" in said(painted(host))
    assert said(painted(alone)) == ["200.0", "70.00"]


def graph(runner: str) -> dict[str, Any]:
    return {"runner": runner, "sizes": [1, 2], "seconds": 0.5, "reserved_mib": 100.0, "used_mib": 90.0}


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
    "client_agreement": [
        {"server": "mock", "backend": "vllm", "load": "4 at a time", "difference": {"mean_ttft_ms": -0.4}, "repeat": {"mean_itl_ms": None}},
        {"server": "mock", "backend": "vllm", "load": "6 a second", "difference": None, "repeat": {"mean_ttft_ms": 1.5}},
    ],
    "repeat": [served(mode="eagle", concurrency=1, spread=dict.fromkeys(FIGURES, -1.5) | {"median_itl_ms": None})],
    "modes": [served(mode="plain", graphs="on", batch=1, step_ms=4.0)],
    "sampling": [
        served(mode="eagle", choice="greedy", sampler=None, batch=1, step_ms=5.0),
        served(mode="eagle", choice="temperature 0.8", sampler="triton", batch=1, step_ms=5.5),
    ],
    "embedded_gpu": [{"system": "transformers", "dtype": "bfloat16", "tokens_per_second": 30.0}],
    "embedded_speculation": [
        {"device": "cpu", "dtype": "float32", "quantization": "int8", "speculation": s, "batch": b, "tokens_per_second": 1.0}
        for s in ("off", "3/1/4") for b in (1, 2)
    ],
    "lossless": [{"shape": "3/1/4", "prompts": 8, "accept_length": 2.0, "differences": []}],
    "memory_limits": [{"case": "8b-plain", "unused": 0.01, "graphs": [graph("target decode")]}, {"case": "bad", "error": "out of memory"}],
}  # fmt: skip


@pytest.mark.parametrize("script", report.SCRIPTS)
def test_every_table_has_a_small_plot_that_is_the_same_each_time(script: str, tmp_path: Path) -> None:
    module, data = importlib.import_module(f"benchmark.{script}"), result(ROWS[script])
    one, other = tmp_path / "1.png", tmp_path / "2.png"
    for file in (one, other):
        module.plot(data, file)
    assert one.read_bytes().startswith(b"\x89PNG")
    assert one.stat().st_size < MOST_BYTES
    assert one.read_bytes() == other.read_bytes()


# ---- the report


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmark" / "results"
    for machine in ("nvidia-h200", "cpu-2"):
        (folder / machine).mkdir(parents=True)
        (folder / machine / "faults.json").write_text(json.dumps(result(ROWS["faults"])))
    return folder


def test_the_report_draws_every_plot_and_shows_it_below_its_table(results: Path, tmp_path: Path) -> None:
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


def test_check_names_a_plot_that_is_missing_or_of_other_rows_and_draws_none(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_without_matplotlib_there_is_no_picture_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    picture.draw(result([]), tmp_path / "x.png", "t", [])
    assert not (tmp_path / "x.png").exists()
    assert "matplotlib is not installed" in capsys.readouterr().out
