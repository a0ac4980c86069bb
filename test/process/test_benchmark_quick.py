"""Every benchmark script runs from end to end on a CPU, against real servers with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "flags", "rows"),
    [
        ("serving_matrix", ["--modes", "eagle"], 2),
        ("model_matrix", ["--modes", "drafts", "--models", "qwen3-30b-a3b,qwen3-30b-a3b-fp8,gpt-oss-20b,gpt-oss-120b,mimo-7b"], 5),
        ("model_matrix", ["--modes", "drafts", "--models", "glm-4.7-flash,gemma-4-31b,minimax-m2.5,qwen3.5-35b-a3b"], 4),
        ("model_matrix", ["--modes", "drafts", "--models", "deepseek-v3-8-layers,deepseek-v3-4-layers"], 2),
        ("draft_extend_graph", [], 4),
        ("draft_extend_graph", ["--in-process"], 8),
        ("crossover", [], 6),
        ("depth_curve", [], 12),
        ("workloads", ["--modes", "auto"], 4),
        ("cached_states", [], 2),
        ("verify_exact", [], 3),
        ("capture", ["--modes", "eagle"], 1),
        ("step_profile", ["--graphs", "both"], 1),
        ("cpu_serving", ["--prompts", "2"], 6),
        ("faults", [], 5),
        ("abuse", [], 2),
        ("client_agreement", ["--servers", "timed,mock"], 4),
        ("repeat", ["--modes", "eagle", "--rounds", "2"], 2),
        ("modes", ["--modes", "plain"], 6),
        ("sampling", [], 16),
        ("ragged_windows", [], 1),
        ("embedded_gpu", [], 1),
        ("embedded_speculation", [], 4),
        ("tune_grid", [], 3),
        ("lossless", ["--shapes", "3/1/4"], 1),
        ("lossless", ["--default-start"], 6),
        ("exactness", [], 24),
        ("drift_alarm", [], 38),
        ("host_cost", [], 8),
        ("memory_limits", [], 2),
        ("grammar", ["--only", "serving"], 2),
        ("grammar", ["--only", "hostile"], 12),
    ],
)
def test_quick_run_writes_rows_and_a_table(script: str, flags: list[str], rows: int, tmp_path: Path) -> None:
    check_quick_run(script, flags, rows, tmp_path)


def check_quick_run(script: str, flags: list[str], rows: int, tmp_path: Path, seconds: float = 240, nice: int = 0) -> None:
    """A quick run of a benchmark succeeds and writes so many rows. `nice` lowers the priority of its processes."""
    command = [sys.executable, "-m", f"benchmark.{script}", "--quick", "--out", str(tmp_path), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        try:
            said, complained = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, said + complained
    (file,) = tmp_path.glob("*/*.json")
    result = json.loads(file.read_text())
    assert len(result["rows"]) == rows
    assert all(row["commit"] and row["command"].startswith(f"python -m benchmark.{script} --quick") for row in result["rows"])
    assert "| --- |" in said
    assert not any(row.get("failed") for row in result["rows"])


@pytest.mark.usefixtures("programs_start_cold")
def test_terminated_benchmark_stops_its_server(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "benchmark.repeat", "--quick", "--out", str(tmp_path), "--modes", "eagle", "--rounds", "50"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        started = next(line for line in process.stdout if "launch_server" in line)
        deadline = time.monotonic() + 60
        while len(children := psutil.Process(process.pid).children(recursive=True)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(children) >= 3, f"HTTP, scheduler and detokenizer of {started}"
        process.terminate()
        process.stdout.read()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(children, timeout=10)[1]
