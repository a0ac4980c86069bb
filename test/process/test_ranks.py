"""Two ranks with real processes on the CPU: the text of one rank, and an end to every request when a rank fails."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from process import rank_faults, rank_storm
from process.fake import Server, dummy_model, serving
from runtime import Engine, check_acceptance

PATIENCE = 60.0
FLAGS = ("--tp-size", "2", "--cpu-threads", "1", "--skip-server-warmup", "--dtype", "float32")
PROMPTS = ["The capital of France is", "Once upon a time"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def two_ranks(model: Path, behaviour: str = "well", ready: bool = True) -> Iterator[Server]:
    with serving(model, *FLAGS, behaviour=behaviour, ready=ready, program=rank_faults.__file__) as server:
        yield server


def assert_ended(server: Server, children: list[psutil.Process]) -> None:
    """It failed, and neither processes, files nor shared memory are left."""
    assert server.process.wait(PATIENCE) == 1
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []
    assert server.folders() == []
    assert "Traceback" not in server.text() or "failed in step" in server.text() or "different tokens" in server.text()


def assert_stream_fails(server: Server) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    stream = server.stream(400)
    assert stream.join(PATIENCE)
    assert any('"error"' in event for event in stream.events), server.text()
    assert_ended(server, children)


def generate(**options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    with Engine(device="cpu", quantization="none", cpu_threads=1, max_total_tokens=4096, **options) as engine:
        outputs = engine.generate(PROMPTS, sampling, return_logprob=True)
        return outputs, engine.get_server_info()["internal_states"][0]


def test_the_embedded_model_writes_the_same_text_on_two_ranks() -> None:
    alone, _ = generate()
    together, state = generate(tp_size=2)
    assert [o["output_ids"] for o in together] == [o["output_ids"] for o in alone]
    for mine, its in zip(together, alone, strict=True):
        gaps = [
            a[0] - b[0] for a, b in zip(mine["meta_info"]["output_token_logprobs"], its["meta_info"]["output_token_logprobs"], strict=True)
        ]
        assert max(map(abs, gaps)) < 1e-4
    worker = state["worker"]
    assert [rank["rank"] for rank in worker["ranks"]] == [0, 1]
    assert all(rank["memory_mib"]["KV cache"] > 0 for rank in worker["ranks"])
    assert worker["token_checks"] > 0
    assert 0 < worker["exchange_share"] < 1
    assert state["spec_accept_length"] > 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_hangs_ends_the_server(model: Path, number: signal.Signals) -> None:
    with two_ranks(model) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        stream = server.stream(400)
        server.child("worker-1").send_signal(number)
        assert stream.join(PATIENCE)
        assert any('"error"' in event for event in stream.events), server.text()
        assert_ended(server, children)
        assert "worker-1 process died: signal SIGKILL" in server.text() or "rank 1 hangs or is gone" in server.text()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("diverge", "the ranks committed different tokens in step 7, found in step 8"),
        ("oom", "rank 1 failed in step 7: OutOfMemoryError: tried to allocate 1.00 GiB"),
        ("stuck", "rank 0 failed in step"),
    ],
)
def test_a_rank_that_misbehaves_is_named_and_ends_the_server(model: Path, behaviour: str, words: str) -> None:
    with two_ranks(model, behaviour) as server:
        assert_stream_fails(server)
        assert words in server.text()


def test_a_rank_without_memory_for_its_weights_is_named(model: Path) -> None:
    with two_ranks(model, "oom-load", ready=False) as server:
        assert server.process.wait(PATIENCE) == 1
        assert "worker-1 failed: OutOfMemoryError" in server.text()
        assert server.folders() == []


def test_the_server_ends_cleanly_after_a_signal(model: Path) -> None:
    with two_ranks(model) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.complete([5, 6, 7]).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        _, alive = psutil.wait_procs(children, timeout=PATIENCE)
        assert alive == []
        assert "died" not in server.text()
        assert server.folders() == []


# ---- several nodes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def two_nodes(model: Path) -> Iterator[tuple[Server, Server]]:
    """Nodes 0 and 1 on this host, which talk over sockets."""
    flags = (*FLAGS, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--random-seed", "3")
    with (
        serving(model, *flags, "--node-rank", "1", ready=False, program=rank_faults.__file__, behaviour="well") as other,
        serving(model, *flags, program=rank_faults.__file__, behaviour="well") as first,
    ):
        yield first, other


def test_two_nodes_serve_and_end_together(model: Path) -> None:
    with two_nodes(model) as (first, other):
        assert first.complete([5, 6, 7]).status_code == 200
        assert len(first.state()["worker"]["ranks"]) == 2
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE) == 0
        assert other.process.wait(PATIENCE) == 0
        assert "talon: ready, worker-1 on this node" in other.text()
        assert first.folders() == other.folders() == []


def test_a_node_that_is_lost_ends_the_other(model: Path) -> None:
    with two_nodes(model) as (first, other):
        children = psutil.Process(first.process.pid).children(recursive=True)
        stream = first.stream(400)
        ranks = psutil.Process(other.process.pid).children(recursive=True)
        other.process.kill()
        assert stream.join(PATIENCE)
        assert any('"error"' in event for event in stream.events), first.text()
        assert_ended(first, children)
        assert psutil.wait_procs(ranks, timeout=PATIENCE)[1] == []


def test_a_node_ends_when_node_0_is_gone(model: Path) -> None:
    with two_nodes(model) as (first, other):
        first.process.kill()
        assert other.process.wait(PATIENCE) == 1
        assert other.folders() == []


def test_a_storm_of_kills_aborts_and_bad_requests_loses_nothing() -> None:
    outcome = rank_storm.storm(rounds=7, seed=9, kill_share=0.15)
    assert outcome["wrong"] == []
    assert outcome["answered"] > 10
    assert set(outcome["rounds"]) == {"abort", "ask_badly", "kill"}


def test_acceptance_on_two_ranks_is_the_same_eager_and_through_graphs(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp-size", "2", "--device", "cpu", "--quantization", "none", "--cpu-threads", "1", "--max-total-tokens", "8192"]
    assert check_acceptance.main([*flags, "--num-prompts", "3", "--max-new-tokens", "20"]) == 0
    text = capfd.readouterr().out
    assert "the text is that of plain decoding for 3 of 3 prompts" in text
    assert "acceptance and text are the same" in text
