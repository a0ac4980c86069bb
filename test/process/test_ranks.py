"""Two ranks with real processes on the CPU: the text of one rank, and an end to every request when a rank fails."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmark.ports import free_port

from ipv6 import needs_ipv6
from process import rank_life, rank_storm
from process.fake import ENV, Server, dummy_model
from process.rank_deaths import PATIENCE, Place, Role, strike, two_nodes, two_ranks
from runtime import Engine
from unit.small_tokenizer import write_small_tokenizer

PROMPTS = ["The capital of France is", "Once upon a time"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_model(tmp_path_factory.mktemp("models") / "tiny")


def assert_ended(server: Server, children: list[psutil.Process]) -> None:
    """It failed, and neither processes, files nor shared memory are left."""
    assert server.process.wait(PATIENCE) == 1
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []
    assert server.folders() == []
    assert "Traceback" not in server.text() or "failed in step" in server.text()


def generate(**options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sampling = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
    common = {"device": "cpu", "quantization": "none", "cpu_threads": 1, "max_total_tokens": 4096, "grammar_backend": "none"}
    with Engine(**common, **options) as engine:
        outputs = engine.generate(PROMPTS, sampling, return_logprob=True)
        return outputs, engine.get_server_info()["internal_states"][0]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return generate()[0]


@pytest.mark.parametrize("draft_ranks", [1, 2])
def test_the_embedded_model_writes_the_same_text_on_two_ranks(alone: list[dict[str, Any]], draft_ranks: int) -> None:
    together, state = generate(tp_size=2, speculative_draft_tp_size=draft_ranks)
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


@pytest.mark.parametrize(
    ("place", "role", "fault", "words"),
    [
        ("host", "worker-1", "SIGKILL", "worker-1 process died: signal SIGKILL"),
        ("host", "worker-1", "SIGSTOP", "rank 1 hangs or is gone"),
        ("host", "scheduler", "SIGSTOP", "rank 0 does not answer"),
        ("host", "worker-1", "loop", "rank 0 failed in step"),
        ("host", "scheduler", "spin", "does not start: rank 0 has waited 7 s for it"),
        ("host", "worker-1", "diverge", "the ranks committed different tokens in step 7, found in step 8"),
        ("host", "worker-1", "oom", "rank 1 failed in step 7: OutOfMemoryError: tried to allocate 1.00 GiB"),
        ("host", "scheduler", "oom", "rank 0 failed in step 7: OutOfMemoryError: tried to allocate 1.00 GiB"),
        ("nodes", "worker-1", "SIGSTOP", "rank 1 hangs or is gone"),
        ("nodes", "scheduler", "SIGSTOP", "rank 0 does not answer"),
    ],
)
def test_a_rank_that_is_lost_ends_the_server(model: Path, place: Place, role: Role, fault: str, words: str) -> None:
    outcome, text = strike(model, place, role, fault)
    assert outcome.clean, f"{outcome}\n{text}"
    assert words in text
    assert "Traceback" not in text or "failed in step" in text or "different tokens" in text


def test_a_pause_of_all_processes_longer_than_any_timeout_ends_nothing(model: Path) -> None:
    with two_ranks(model) as server:
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        stream = server.stream(480)
        for process in processes:
            process.suspend()
            time.sleep(0.1)  # a rank that runs on waits for the other one in an exchange
        time.sleep(9.0)
        for process in reversed(processes):
            process.resume()
        assert stream.join(PATIENCE)
        assert stream.events[-1] == "[DONE]", server.text()


@pytest.mark.parametrize(("role", "rank"), [("scheduler", 0), ("worker-1", 1)])
def test_a_rank_without_memory_for_its_weights_is_named(model: Path, role: Role, rank: int) -> None:
    with two_ranks(model, behaviour=f"oom-load:{role}", ready=False) as server:
        assert server.process.wait(PATIENCE) == 1
        text = server.text()
        assert f"talon: rank {rank} ({role}) failed: OutOfMemoryError: tried to allocate 1.00 GiB" in text, text
        assert server.folders() == []


@pytest.mark.parametrize("role", ["scheduler", "worker-1"])
def test_a_rank_that_starts_slowly_is_waited_for(model: Path, role: Role) -> None:
    with two_ranks(model, "--speculative-algorithm", "NGRAM", behaviour=f"slow-start:{role}") as server:
        assert server.complete([5, 6, 7]).status_code == 200


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


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
def test_two_nodes_serve_and_end_together(model: Path, host: str) -> None:
    with two_nodes(model, host=host) as (first, other):
        assert first.complete([5, 6, 7]).status_code == 200
        assert len(first.state()["worker"]["ranks"]) == 2
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE) == 0
        assert other.process.wait(PATIENCE) == 0
        assert "talon: ready, worker-1 on this node" in other.text()
        assert first.folders() == other.folders() == []


def test_json_logs_of_two_nodes_have_no_other_lines(model: Path) -> None:
    with two_nodes(model, "--log-format", "json") as (first, other):
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE) == other.process.wait(PATIENCE) == 0
        assert all(json.loads(line)["message"] for node in (first, other) for line in node.text().splitlines())


def test_a_signal_to_all_nodes_drains(model: Path) -> None:
    with two_nodes(model) as (first, other):
        stream = first.stream(120)
        other.process.send_signal(signal.SIGTERM)
        first.process.send_signal(signal.SIGTERM)
        assert stream.join(PATIENCE)
        assert stream.events[-1] == "[DONE]", first.text()
        assert first.process.wait(PATIENCE) == 0
        assert other.process.wait(PATIENCE) == 0
        assert first.folders() == other.folders() == []


def test_a_second_signal_ends_a_node_at_once(model: Path) -> None:
    with two_nodes(model) as (_, other):
        other.process.send_signal(signal.SIGTERM)
        while "waiting for node 0 to end" not in other.text():
            time.sleep(0.05)
        other.process.send_signal(signal.SIGTERM)
        assert other.process.wait(PATIENCE) == 0


def test_a_node_that_does_not_start_is_reported(model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with two_ranks(model, "--nnodes", "2", "--dist-init-addr", address, "--dist-timeout", "2", ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert f"talon: Rank 0 did not meet the other ranks at tcp://{address}: " in server.text()
        assert "All 2 ranks must start within --dist-timeout, 2 s." in server.text()
        assert "Traceback" not in server.text()
        assert server.folders() == []


def test_a_node_waits_for_node_0_no_longer_than_its_time_out(model: Path) -> None:
    flags = ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-timeout", "2"]
    with two_ranks(model, *flags, ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert "connection refused. All 2 ranks must start within --dist-timeout, 2 s." in server.text()


def test_a_node_waits_no_longer_for_a_program_that_is_not_node_0(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        flags = ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", f"127.0.0.1:{silent.getsockname()[1]}", "--dist-timeout", "2"]
        with two_ranks(model, *flags, ready=False) as server:
            assert server.process.wait(PATIENCE) == 2
            assert "does not answer as node 0 does. All 2 ranks must start within --dist-timeout, 2 s." in server.text()


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


def test_iteration_graphs_of_two_ranks_change_no_token(tmp_path: Path) -> None:
    """At depths 0 and 3, greedy and sampled, with eager samples; requests end, are aborted and are retracted."""
    model = str(dummy_model(tmp_path / "model"))
    flags = ["--model", model, "--load-format", "dummy", "--dtype", "float32", "--tp-size", "2", "--device", "cpu", "--cpu-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--max-running-requests", "40", "--speculative-algorithm", "STANDALONE"]
    flags += ["--speculative-draft-model-path", model, "--speculative-num-steps", "3", "--speculative-disable-by-batch-size", "8"]
    flags.append("--enable-iteration-graph")
    done = subprocess.run([sys.executable, rank_life.__file__, *flags], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, separate = json.loads(done.stdout.splitlines()[-1]).values()
    assert whole["life"] == separate["life"]
    iterations, passes = ("iteration K=3", "iteration K=0"), ("verify", "target decode")
    for name, part in zip(iterations, passes, strict=True):
        assert whole["replays"][name] > 0 == separate["replays"][name]
        assert whole["replays"][name] + whole["replays"][part] == separate["replays"][part]
    assert whole["samples"] > 0 < separate["samples"]


def test_acceptance_on_two_ranks_is_the_same_eager_and_through_graphs(tmp_path: Path) -> None:
    model = str(write_small_tokenizer(dummy_model(tmp_path / "model")))
    flags = ["--model", model, "--load-format", "dummy", "--dtype", "float32", "--tp-size", "2", "--device", "cpu", "--cpu-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", model]
    flags += ["--speculative-num-steps", "3", "--max-running-requests", "2"]
    command = [sys.executable, "-m", "runtime.check_acceptance", *flags, "--num-prompts", "2", "--max-new-tokens", "16"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True)  # a process of its own, which ends if it loses its other rank
    assert done.returncode == 0, done.stderr
    assert "the text is that of plain decoding for 2 of 2 prompts" in done.stdout
    assert "acceptance and text are the same" in done.stdout
