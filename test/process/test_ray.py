"""Two ranks as Ray actors on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from process.fake import ENV, ROOT, dummy_model, serving
from process.test_ranks import FLAGS, PATIENCE


def test_two_ray_actors_serve_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    flags = (*FLAGS, "--distributed-executor-backend", "ray")
    with serving(
        dummy_model(tmp_path / "tiny"), *flags, behaviour="well", ready=False, program=str(Path(__file__).with_name("ray_server.py"))
    ) as server:
        server.wait_ready(180.0)
        assert server.complete([5, 6, 7]).status_code == 200
        assert len(server.state()["worker"]["ranks"]) == 2
        stream = server.stream(400)
        everything = psutil.Process(server.process.pid).children(recursive=True)
        lines = {p: " ".join(p.cmdline()) for p in everything}
        ranks = [p for p, line in lines.items() if "runtime.entrypoints.child" in line or "talon::" in line or "RankHost" in line]
        assert len(ranks) >= 5  # two actors, their ranks, and the detokenizer
        rank = next(p for p in ranks if "worker-1" in lines[p])
        rank.send_signal(signal.SIGKILL)
        assert stream.join(PATIENCE)
        assert any('"error"' in event for event in stream.events), server.text()
        assert server.process.wait(PATIENCE) == 1
        assert psutil.wait_procs(ranks, timeout=PATIENCE)[1] == []


def test_the_example_answers_a_data_set_with_ray_data(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    prompts = ["The capital of France is", "Once upon a time", "Water boils at"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--gpus", "0", "--max-tokens", "4"]
    command = [sys.executable, str(ROOT / "examples" / "ray_data.py"), *flags]
    done = subprocess.run(
        command,
        env={**ENV, "PYTHONPATH": os.pathsep.join([ENV["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for file in (tmp_path / "out").iterdir() for line in file.read_text().splitlines()]
    assert sorted(row["prompt"] for row in rows) == sorted(prompts)
    assert all(row["answer"] for row in rows)
