"""Two ranks as Ray actors on the CPU."""

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

pytest.importorskip("ray")

from process.fake import ENV, ROOT, dummy_model
from process.rank_deaths import PATIENCE, Role, runs, serving_at, strike


@pytest.fixture(autouse=True)
def small_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends no statistics, and starts no processes before an actor needs one."""
    monkeypatch.setitem(ENV, "RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setitem(ENV, "RAY_prestart_worker_first_driver", "0")


@pytest.mark.parametrize(("role", "fault"), [("worker-1", "SIGKILL"), ("scheduler", "SIGSTOP")])
def test_a_lost_rank_of_ray_ends_the_server_and_leaves_nothing(tmp_path: Path, role: Role, fault: str) -> None:
    outcome, text = strike(dummy_model(tmp_path / "tiny"), "ray", role, fault)
    assert outcome.clean, f"{outcome}\n{text}"


def test_a_server_of_ray_answers_open_requests_after_a_signal(tmp_path: Path) -> None:
    with serving_at("ray", dummy_model(tmp_path / "tiny"), "well") as (server,):
        stream = server.stream(400)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert stream.join(PATIENCE)
        assert stream.events[-1] == "[DONE]", server.text()
        assert server.process.wait(PATIENCE) == 0
        assert "SIGTERM received" not in server.text(), "Ray's handler is not asked"
        ends = time.monotonic() + 10.0
        while (alive := [process for process in processes if runs(process)]) and time.monotonic() < ends:
            time.sleep(0.1)
        assert alive == [], "Ray's own processes end too"


def test_the_example_answers_a_data_set_with_ray_data(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    prompts = ["The capital of France is", "Once upon a time", "Water boils at"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--gpus", "0", "--max-tokens", "4"]
    command = [sys.executable, str(ROOT / "examples" / "ray_data.py"), *flags]
    done = subprocess.run(
        command,
        env={**ENV, "PYTHONPATH": os.pathsep.join([ENV["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for file in (tmp_path / "out").iterdir() for line in file.read_text().splitlines()]
    assert sorted(row["prompt"] for row in rows) == sorted(prompts)
    assert all(row["answer"] for row in rows)
