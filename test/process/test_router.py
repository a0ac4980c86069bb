"""sglang-router in front of two servers: requests are answered, keep to the server with their prefix, and survive its death."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from benchmark.ports import free_port
from fake import Server, dummy_model, serving
from openai import OpenAI

pytest.importorskip("sglang_router")

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
WORDS = "the quick brown fox jumps over the lazy dog and "


@contextmanager
def router(workers: list[str], log: Path) -> Iterator[str]:
    """The router's address once it sends requests to all `workers`."""
    port, metrics = free_port(), free_port()
    flags = [*documented_flags(), "--worker-startup-check-interval", "1"]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--worker-urls", *workers, *flags]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60.0
        while _healthy(url) < len(workers):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def documented_flags() -> list[str]:
    """The flags of the router in the documentation, except for addresses."""
    command = re.search(r"launch_router --port 30000 --worker-urls(?: http://\S+)+(.+?)```", DOCS.read_text(), re.DOTALL)
    assert command is not None
    return command[1].replace("\\\n", " ").split()


def _healthy(url: str) -> int:
    try:
        workers = httpx.get(f"{url}/workers", timeout=5.0, verify=False).json()["workers"]
    except (httpx.HTTPError, ValueError):
        return 0
    return sum(worker["is_healthy"] for worker in workers)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    model = dummy_model(tmp_path / "model")
    with ExitStack() as stack:
        yield [stack.enter_context(serving(model, "--max-running-requests", "2", "--max-queued-requests", "8")) for _ in range(2)]


def test_a_router_spreads_requests_and_survives_a_dead_server(servers: list[Server], tmp_path: Path) -> None:
    with router([server.url for server in servers], tmp_path / "router.log") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        ask = lambda prompt: client.completions.create(model="default", prompt=prompt, max_tokens=4)  # noqa: E731
        assert client.models.list().data[0].id == "fake"
        stream = list(client.completions.create(model="fake", prompt=WORDS, max_tokens=4, stream=True))
        assert stream[-1].choices[0].finish_reason is not None
        native = httpx.post(f"{url}/generate", json={"text": WORDS, "sampling_params": {"max_new_tokens": 4}}, timeout=30)
        assert native.json()["meta_info"]["completion_tokens"] == 4
        cached = [ask(WORDS * 4 + str(i)).usage.prompt_tokens_details.cached_tokens for i in range(5)]
        assert all(count > 0 for count in cached[1:]), cached
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, f"{i} {WORDS}") for i in range(40)]
            servers[1].process.send_signal(signal.SIGKILL)
            assert all(answer.result().choices[0].finish_reason for answer in answers)
        assert ask(WORDS).choices[0].finish_reason
        client.close()


def test_a_router_uses_all_servers_for_one_system_prompt_and_recovers_from_full_queues(servers: list[Server], tmp_path: Path) -> None:
    system = {"role": "system", "content": WORDS * 2}

    def chat(index: int) -> int:
        messages = [system, {"role": "user", "content": f"question {index}"}]
        body = {"model": "default", "messages": messages, "max_tokens": 50, "ignore_eos": True}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, verify=False).status_code

    with router([server.url for server in servers], tmp_path / "router.log") as url, ThreadPoolExecutor(80) as pool:
        before = [server.state()["num_requests_total"] for server in servers]
        assert set(pool.map(chat, range(16))) == {200}
        assert all(server.state()["num_requests_total"] >= count + 4 for server, count in zip(servers, before, strict=True))  # type: ignore[operator]
        assert set(pool.map(chat, range(80))) - {200} <= {429, 503}
        deadline = time.monotonic() + 30.0  # by default the router would refuse all requests for 60 s
        while chat(0) != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
