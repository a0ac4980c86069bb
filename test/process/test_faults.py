"""What breaks, with real processes: every request gets an end, and nothing is left behind."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from process.fake import POISON, Server, dummy_model, serving

PATIENCE = 60.0
"""Seconds until a test gives up. Tests do not measure times; `benchmark/faults.py` does."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with serving(model, behaviour="0.03") as server:
        yield server


def wait_until(true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return False


def status(server: Server, path: str) -> int:
    try:
        return server.get(path).status_code
    except httpx.HTTPError:
        return 0


def assert_gone(server: Server, children: list[psutil.Process]) -> None:
    """No child survived and the private folder is removed."""
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []
    assert [folder for folder in server.folders() if folder.name.startswith("talon-")] == []


@pytest.mark.parametrize("role", ["talon::scheduler", "talon::detokenizer"])
def test_a_killed_process_ends_streams_with_an_error_turns_health_red_and_ends_the_server(server: Server, role: str) -> None:
    children = psutil.Process(server.process.pid).children()
    assert status(server, "/health") == status(server, "/ready") == 200
    stream = server.stream(400)
    server.child(role).kill()
    assert wait_until(lambda: status(server, "/health") == 503)
    assert stream.join(PATIENCE)
    assert stream.events[-1] != "[DONE]" or "error" in stream.events[-2]
    assert any('"error"' in event for event in stream.events)
    assert server.process.wait(PATIENCE) == 1
    assert f"the {role.removeprefix('talon::')} process died: signal SIGKILL" in server.text()
    assert "Traceback" not in server.text()
    assert_gone(server, children)


def test_a_failing_step_fails_its_requests_only_and_the_third_within_a_minute_ends_the_server(server: Server) -> None:
    children = psutil.Process(server.process.pid).children()
    free = server.state()["pages_free"]
    stream = server.stream(60)
    for _ in range(2):
        answer = server.complete([5, POISON])
        assert answer.status_code == 500
        assert not re.search(r"0x|/usr|Traceback|RuntimeError", answer.text)
    assert stream.join(PATIENCE)
    assert stream.events[-1] == "[DONE]"  # it decoded between the failures
    assert server.complete([5, 6]).status_code == 200
    assert server.state()["pages_free"] == free
    stream = server.stream(400)
    assert server.complete([5, POISON]).status_code >= 500
    assert stream.join(PATIENCE)
    assert any('"error"' in event for event in stream.events)
    assert server.process.wait(PATIENCE) == 1
    assert_gone(server, children)


def test_flushing_a_busy_cache_is_a_conflict_without_a_traceback(server: Server) -> None:
    stream = server.stream(60)
    assert wait_until(lambda: stream.events)
    answer = httpx.post(f"{server.url}/flush_cache", timeout=10)
    assert answer.status_code == 409
    assert "while requests are running" in answer.json()["error"]["message"]
    assert stream.join(PATIENCE)
    assert wait_until(lambda: httpx.post(f"{server.url}/flush_cache", timeout=10).status_code == 200)
    assert "Traceback" not in server.text()


def test_a_stopped_scheduler_is_noticed_dumped_and_ended(server: Server) -> None:
    children = psutil.Process(server.process.pid).children()
    stream = server.stream(400)
    server.child("talon::scheduler").send_signal(signal.SIGSTOP)
    assert wait_until(lambda: status(server, "/health") == 503)
    assert stream.join(PATIENCE)
    assert any('"error"' in event for event in stream.events)
    assert server.process.wait(PATIENCE) == 1
    assert "the scheduler process hangs" in server.text()
    assert "scheduler.py" in server.text()  # its stacks
    assert_gone(server, children)


def test_sigterm_drains_what_is_open_refuses_what_is_new_and_exits_0(server: Server) -> None:
    children = psutil.Process(server.process.pid).children()
    stream = server.stream(200)  # 6 s, so that what follows comes before its end on a busy machine too
    server.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: status(server, "/ready") == 503)
    assert status(server, "/health") == 200
    late = httpx.post(f"{server.url}/v1/completions", json={"model": "fake", "prompt": [5], "max_tokens": 1})
    assert late.status_code == 503
    assert stream.join(PATIENCE)
    assert stream.events[-1] == "[DONE]"
    assert '"length"' in stream.events[-2]
    assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in server.text()
    assert_gone(server, children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_drains_too(server: Server, number: signal.Signals) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    stream = server.stream(100)
    for process in (*children, server.process):
        process.send_signal(number)
    assert stream.join(PATIENCE)
    assert stream.events[-1] == "[DONE]", server.text()
    assert server.process.wait(PATIENCE) == 0
    assert_gone(server, children)


def test_a_sighup_drains_and_a_second_one_does_not_cut_it_off(server: Server) -> None:
    children = psutil.Process(server.process.pid).children()
    stream = server.stream(100)
    server.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: status(server, "/ready") == 503)
    server.process.send_signal(signal.SIGHUP)
    assert stream.join(PATIENCE)
    assert stream.events[-1] == "[DONE]", server.text()
    assert server.process.wait(PATIENCE) == 0
    assert_gone(server, children)


def test_the_drain_is_cut_off_at_its_time_out(model: Path) -> None:
    with serving(model, "--shutdown-timeout", "0.3", behaviour="0.05") as server:
        stream = server.stream(400)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0
        assert stream.join(PATIENCE)
        assert any('"abort"' in event for event in stream.events)
        assert_gone(server, [])


@pytest.mark.parametrize("dies", [False, True])
def test_clients_that_neither_send_nor_read_leave_no_tracebacks_at_the_end(server: Server, dies: bool) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.5)
        if dies:
            server.child("talon::scheduler").kill()
        else:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == dies
    assert "Traceback" not in server.text(), server.text()


def test_a_second_sigterm_ends_at_once(server: Server) -> None:
    children = psutil.Process(server.process.pid).children()
    server.stream(400)
    server.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: status(server, "/ready") == 503)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert_gone(server, children)


def test_children_follow_a_killed_parent(server: Server) -> None:
    children = psutil.Process(server.process.pid).children()
    assert len(children) == 2
    server.process.kill()
    assert_gone(server, children)


def test_a_signal_while_loading_ends_the_server(model: Path) -> None:
    with serving(model, behaviour="slow-load", ready=False) as server:
        assert wait_until(lambda: len(psutil.Process(server.process.pid).children()) == 2)
        assert wait_until(lambda: server.folders())
        time.sleep(0.5)
        children = psutil.Process(server.process.pid).children()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0
        assert not re.search("Traceback|CancelledError", server.text())
        assert_gone(server, children)


def test_a_sighup_while_loading_does_not_end_the_server(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: sk-a}]")
    with serving(model, "--api-key-file", str(keys), behaviour="slow-load", ready=False) as server:
        assert wait_until(lambda: len(psutil.Process(server.process.pid).children()) == 2)
        server.process.send_signal(signal.SIGHUP)
        assert wait_until(lambda: "SIGHUP: the API keys will be read when the server is ready" in server.text())
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0


def test_a_child_that_cannot_be_what_was_asked_is_one_line_and_exit_2(model: Path) -> None:
    with serving(model, behaviour="config-error", ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert "talon: the fake worker cannot be built as asked\n" in server.text()
        assert "Traceback" not in server.text()
        assert_gone(server, [])


def test_a_child_that_breaks_while_starting_says_how_and_exits_1(model: Path) -> None:
    with serving(model, behaviour="broken", ready=False) as server:
        assert server.process.wait(PATIENCE) == 1
        assert "talon: the scheduler failed: RuntimeError: the fake worker is broken\n" in server.text()
        assert_gone(server, [])


def test_the_private_folder_admits_its_owner_only_and_only_http_listens(model: Path) -> None:
    with serving(model) as server:
        (folder,) = (folder for folder in server.folders() if folder.name.startswith("talon-"))
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {file.name for file in folder.iterdir()} == {"scheduler", "detokenizer", "tokenizer"}
        parent = psutil.Process(server.process.pid)
        sockets = [socket for process in (parent, *parent.children()) for socket in process.net_connections()]
        assert [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN] == ["127.0.0.1"]
