"""Every benchmark script runs from end to end on a CPU, against real servers with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "flags", "rows"),
    [
        ("serving_matrix", ["--modes", "eagle"], 2),
        ("draft_extend_graph", [], 4),
        ("draft_extend_graph", ["--in-process"], 8),
        ("crossover", [], 6),
        ("verify_exact", [], 3),
        ("capture", ["--modes", "eagle"], 1),
        ("step_profile", ["--graphs", "both"], 1),
        ("cpu_serving", ["--prompts", "2"], 4),
        ("faults", [], 5),
        ("client_agreement", ["--servers", "timed,mock"], 4),
        ("repeat", ["--modes", "eagle", "--rounds", "2"], 2),
        ("modes", ["--modes", "plain"], 6),
        ("sampling", [], 16),
        ("embedded_gpu", [], 1),
        ("embedded_speculation", [], 4),
        ("lossless", [], 2),
        ("memory_limits", [], 2),
    ],
)
def test_a_quick_run_leaves_rows_and_a_table(script: str, flags: list[str], rows: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmark.{script}", "--quick", "--out", str(tmp_path), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*/*.json")
    result = json.loads(file.read_text())
    assert len(result["rows"]) == rows
    assert all(row["commit"] and row["command"].startswith(f"python -m benchmark.{script} --quick") for row in result["rows"])
    assert "| --- |" in done.stdout
    assert not any(row.get("failed") for row in result["rows"])
