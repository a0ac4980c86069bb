"""scripts/gpu_check.sh on a machine without a GPU: it runs everything, names failures, and writes them as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def check(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, env={**os.environ, "PATH": path}, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_failures_are_named_and_the_rest_still_runs(tmp_path: Path) -> None:
    done = check("out", "--no-tests", "no_such_benchmark --x", "no_such_benchmark", cwd=tmp_path)
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert done.returncode == 1, done.stderr
    assert found["device"] is None
    assert found["tests"] is None
    assert [run["benchmark"] for run in found["benchmarks"]] == ["no_such_benchmark --x", "no_such_benchmark"]
    assert all(run["exit"] for run in found["benchmarks"])
    assert {"there is no CUDA device", "benchmark.no_such_benchmark --x", "benchmark.no_such_benchmark"} <= set(found["failed"])
    assert found["versions"]["torch"]["wanted"]
    assert sorted(file.name for file in (tmp_path / "out").glob("*.log")) == ["1-no_such_benchmark.log", "2-no_such_benchmark.log"]


@pytest.mark.parametrize("arguments", [(), ("--no-tests",)])
def test_folder_is_required(arguments: tuple[str, ...]) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert "gpu_check.sh FOLDER" in done.stdout
