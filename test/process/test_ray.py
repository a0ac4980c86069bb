"""Two ranks as Ray actors on the CPU."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from process.fake import dummy_model, serving
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
