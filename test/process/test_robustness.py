"""Storms: many clients at once, good and bad, patient and not; afterwards nothing is lost and nothing is held."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fake
import httpx
import psutil
import pytest

from conftest import Embedded
from event_loop import in_event_loop

BAD: list[tuple[str, Any, int]] = [
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b'{"messages": "\xff"}', 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 10_000}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404),
    ("/v1/completions", {"prompt": ""}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}, 400),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400),
    ("/v1/completions", {"prompt": [10**6]}, 400),
    ("/v1/completions", {"prompt": [1] * 10_000}, 400),
    ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}, 400),
    ("/nowhere", {}, 404),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake.Server]:
    """A server whose worker takes 2 ms a step."""
    with fake.serving(fake.dummy_model(Path(tmp_path_factory.mktemp("model"))), behaviour="0.002") as server:
        yield server


@pytest.fixture
def slow_server(tmp_path: Path) -> Iterator[fake.Server]:
    """A server whose worker takes 20 ms a step, so that clients on a busy machine leave before an answer of 400 tokens ends."""
    with fake.serving(fake.dummy_model(tmp_path), behaviour="0.02") as server:
        yield server


def quiet(url: str, seconds: float = 60.0) -> dict[str, Any]:
    """The scheduler's figures once nothing runs, waits or holds memory."""
    deadline = time.monotonic() + seconds
    while True:
        state = httpx.get(f"{url}/get_server_info", timeout=10, verify=False).json()["internal_states"][0]
        if not (state["num_running_reqs"] or state["num_queue_reqs"] or state["token_usage"]):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


async def bad_request(client: httpx.AsyncClient, which: tuple[str, Any, int]) -> str:
    path, body, status = which
    answer = await (client.post(path, content=body) if isinstance(body, bytes) else client.post(path, json=body))
    assert answer.status_code == status, (path, body, answer.text)
    assert answer.json()["error"]["message"]
    assert not re.search(r"0x[0-9a-f]{4}|Traceback|site-packages|\.py\b", answer.text), answer.text
    return "refused"


async def whole(client: httpx.AsyncClient, tokens: int) -> str:
    answer = await client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens
    return "whole"


async def streamed(client: httpx.AsyncClient, tokens: int, leave_after: int | None) -> str:
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    seen = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                seen += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
            if leave_after is not None and seen > leave_after:
                return "left"
            if line == "data: [DONE]":
                assert seen == tokens
                return "streamed"
    raise AssertionError("the stream ended without its end mark")


async def impatient(client: httpx.AsyncClient, seconds: float) -> str:
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "n": 2}
    try:
        answer = await client.post("/v1/completions", json=body, timeout=seconds)
    except httpx.TimeoutException:
        return "left"
    assert answer.json()["usage"]["completion_tokens"] == 800, answer.text  # this client was slow itself
    return "whole"


def mixed(client: httpx.AsyncClient, draw: random.Random, tokens: int) -> Any:
    kind = draw.randrange(5)
    if kind == 0:
        return bad_request(client, draw.choice(BAD))
    if kind == 1:
        return whole(client, draw.randint(1, tokens))
    if kind == 2:
        return impatient(client, draw.uniform(0.01, 0.2))
    return streamed(client, draw.randint(tokens // 2, tokens), draw.randint(0, tokens // 4) if kind == 3 else None)


async def storm(url: str, count: int, at_once: int, tokens: int, seed: int) -> dict[str, int]:
    """Fire `count` mixed requests; how each kind ended."""
    draw, room = random.Random(seed), asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False, verify=False) as client:

        async def one() -> str:
            async with room:
                return await mixed(client, draw, tokens)

        outcomes = await asyncio.gather(*(one() for _ in range(count)))
    return {outcome: outcomes.count(outcome) for outcome in set(outcomes)}


def test_64_mixed_requests_at_once_on_the_real_model_leak_nothing(embedded: Embedded) -> None:
    before = quiet(embedded.url)
    outcomes = asyncio.run(storm(embedded.url, 64, 64, 8, seed=0))
    after = quiet(embedded.url)
    assert set(outcomes) == {"refused", "whole", "streamed", "left"}
    assert after["pages_free"] == before["pages_free"]
    assert after["num_failed_steps_total"] == 0
    assert embedded.process.poll() is None


@in_event_loop
async def test_after_1000_random_aborts_memory_is_back_at_the_baseline(slow_server: fake.Server) -> None:
    server, before = slow_server, quiet(slow_server.url)
    draw, room = random.Random(1), asyncio.Semaphore(48)
    limits = httpx.Limits(max_connections=48, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, trust_env=False, verify=False) as client:

        async def one() -> str:
            async with room:
                return await streamed(client, 400, draw.randint(0, 20))

        assert set(await asyncio.gather(*(one() for _ in range(1000)))) == {"left"}
    after = quiet(server.url)
    assert after["pages_free"] == before["pages_free"]
    assert after["num_aborted_requests_total"] - before["num_aborted_requests_total"] >= 900  # a few end before a busy client leaves


def test_a_mixed_storm_leaves_the_server_as_it_was(server: fake.Server) -> None:
    before = quiet(server.url)
    files = len(psutil.Process(server.process.pid).open_files())
    outcomes = asyncio.run(storm(server.url, 300, 64, 40, 3))
    assert set(outcomes) == {"refused", "whole", "streamed", "left"}
    after = quiet(server.url)
    assert after["pages_free"] == before["pages_free"]
    assert len(psutil.Process(server.process.pid).open_files()) <= files
    assert server.get("/health").status_code == 200


@in_event_loop
async def test_memory_is_freed_when_clients_leave(server: fake.Server) -> None:
    quiet(server.url)
    async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False, verify=False) as client:
        for _ in range(10):
            assert await streamed(client, 400, 3) == "left"
            quiet(server.url)


def test_an_answer_tells_how_its_own_decode_steps_ran(server: fake.Server) -> None:
    """Every step of this worker replays a graph for one request more than there are."""
    before = quiet(server.url)

    def shares(tokens: int) -> tuple[float | None, float | None]:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        meta = httpx.post(f"{server.url}/generate", json=body, timeout=30).json()["meta_info"]
        return meta["graph_hit_rate"], meta["padding_waste"]

    assert shares(1) == (None, None), "the prompt's pass made the only token"
    assert shares(6) == (1.0, 0.5)
    after = quiet(server.url)
    names = ("decode_steps", "graph_steps_total", "live_rows_total", "padded_rows_total")
    assert [after[name] - before[name] for name in names] == [5, 5, 5, 5]


@in_event_loop
async def test_bad_requests_do_no_harm_to_a_stream_beside_them(server: fake.Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
        stream = asyncio.create_task(streamed(client, 300, None))
        for which in BAD * 3:
            await bad_request(client, which)
        big = await client.post("/v1/completions", content=_megabytes(50))
        assert big.status_code == 413
        assert await stream == "streamed"


async def _megabytes(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * (1 << 20)


@in_event_loop
async def test_idle_connections_and_sleepy_readers_do_not_keep_others_waiting(server: fake.Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    crowd = [socket.create_connection((host, int(port)), timeout=10) for _ in range(1000)]
    body = json.dumps({"prompt": [5], "max_tokens": 500, "stream": True, "ignore_eos": True, "logprobs": 20}).encode()
    for sock in crowd[:8]:  # ask for a stream and never read it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False, verify=False) as client:
        assert [await streamed(client, 50, None) for _ in range(5)] == ["streamed"] * 5
    for sock in crowd:
        sock.close()
    quiet(server.url)


@in_event_loop
async def test_health_answers_while_streams_run(server: fake.Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
        work = [asyncio.create_task(streamed(client, 400, None)) for _ in range(8)]
        assert (await client.get("/health")).status_code == 200
        assert not all(task.done() for task in work), "health did not wait for the streams"
        assert await asyncio.gather(*work) == ["streamed"] * 8


@in_event_loop
async def test_large_texts_are_refused_while_health_answers(server: fake.Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
        for size in (64 << 10, 1 << 20):
            for text in ("word " * (size // 5), "x" * size, "<|im_start|>" * (size // 12), "é" * (size // 2), " " * size):
                answer = asyncio.create_task(client.post("/v1/completions", json={"prompt": text}))
                assert (await client.get("/health")).status_code == 200
                assert (await answer).status_code == 400  # longer than the context
