"""The front against bad input, missing keys, leaving clients and a failing engine, over a real socket."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from front import Front, ScriptedScheduler, front, make_manager, until
from pydantic import BaseModel
from tiny import tiny_speculative

from event_loop import in_event_loop
from runtime.batch import SpeculationChange
from runtime.entrypoints.http import connection, limits, sse
from runtime.entrypoints.http.auth import ADMIN_PATHS, OPEN_PATHS, PROBE_PATHS
from runtime.entrypoints.http.page import chat_page
from runtime.entrypoints.native.protocol import GenerateBody, NativeSampling
from runtime.entrypoints.openai.protocol import ChatBody, CompletionBody
from runtime.entrypoints.server.admin import AdminApi
from runtime.entrypoints.server.server import create_app
from runtime.errors import WorkerDied
from runtime.managers.messages import ControlReply, ControlReq, ProfileAt, ToScheduler
from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.spec_stats import SpecStats

HI = [{"role": "user", "content": "hi"}]
STREAM = {"messages": HI, "stream": True}
MIB = 1 << 20
LEAK = re.compile(r"0x[0-9a-f]{4}|Traceback|File \"|\.py\b|/work|/usr|/home|site-packages")
ODD_NUMBERS = ["-9223372036854775808", "-1", "0", "9223372036854775808", "1e400", "true", '"1"', "null"]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after checking its form."""
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    assert not LEAK.search(answer.text)
    return error


# ---- bad input


POSTS = ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort_request"]
MALFORMED = [
    b"{", b"", b"\xff\xfe", b"3", b"[]", b'"x"', b"null", b'{"a":1e400}', b"[" * 200 + b"]" * 200, b'{"prompt": "\xc3\x28"}',
]  # fmt: skip


@in_event_loop
async def test_malformed_bodies_are_400() -> None:
    async with front() as f:
        for path in POSTS:
            for raw in MALFORMED:
                answer = await f.client.post(path, content=raw, headers={"content-type": "application/json"})
                assert answer.status_code == 400, (path, raw)
                assert error_of(answer)["type"] == "invalid_request_error"
        assert await f.fine()


def integer_fields(model: type[BaseModel]) -> Iterator[tuple[str, int]]:
    """Each integer field of a body with its highest value."""
    for name, node in model.model_json_schema()["properties"].items():
        for form in node.get("anyOf", [node]):
            if form.get("type") == "integer":
                yield name, form["maximum"]


def integer_bodies() -> Iterator[tuple[str, str, int]]:
    """Path, body with %s for the number, and the highest number that the field takes."""
    for path, model, base in (
        ("/v1/chat/completions", ChatBody, '"messages":[{"role":"user","content":"x"}]'),
        ("/v1/completions", CompletionBody, '"prompt":"x"'),
        ("/generate", GenerateBody, '"text":"x"'),
    ):
        for name, highest in integer_fields(model):
            logprobs = '"logprobs":true,' if name == "top_logprobs" else ""
            yield path, f'{{{logprobs}{base},"{name}":%s}}', highest
    for name, highest in integer_fields(NativeSampling):
        yield "/generate", f'{{"text":"x","sampling_params":{{"{name}":%s}}}}', highest
    yield "/v1/completions", '{"prompt":"x","stop_token_ids":[%s]}', 258
    yield "/v1/completions", '{"prompt":[1,%s]}', 258
    yield "/generate", '{"input_ids":[%s]}', 258
    yield "/detokenize", '{"tokens":[%s]}', 258


@in_event_loop
async def test_odd_numbers_in_integer_fields_never_break_the_server() -> None:
    async with front(ScriptedScheduler(say=lambda request: "")) as f:
        bodies = list(integer_bodies())
        assert len(bodies) > 25
        for path, form, highest in bodies:
            for number in [*ODD_NUMBERS, str(highest + 1)]:
                answer = await f.client.post(path, content=form % number)
                assert answer.status_code in (200, 400), (path, form % number, answer.text)
                if answer.status_code == 400:
                    assert error_of(answer)["type"] == "invalid_request_error"
                elif number not in ("0", "null", "-1"):
                    assert number == "-9223372036854775808", form % number
                    assert "seed" in form or "priority" in form, form % number
            assert (await f.post("/v1/completions", {"prompt": "x"})).status_code == 200
        assert f.manager.open_requests == 0


@in_event_loop
async def test_odd_keys_in_logit_bias_never_break_the_server() -> None:
    async with front() as f:
        for key in ("-9223372036854775808", "-1", "259", "9223372036854775808", "1e400", "true", "", "٣", "1.0", " 1"):
            answer = await f.post("/v1/completions", {"prompt": "x", "logit_bias": {key: 1}})
            assert answer.status_code == 400, key
            assert "logit_bias" in error_of(answer)["param"]
        assert await f.fine()


@in_event_loop
async def test_a_body_over_the_limit_is_413() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * MIB

    async with front() as f:
        for content in (b"x" * (50 * MIB), chunks()):
            answer = await f.client.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert "32 MiB" in error_of(answer)["message"]
        fits = json.dumps({"prompt": "x", "user": "y" * 4000}).encode() + b" " * (31 * MIB)
        assert (await f.client.post("/v1/completions", content=fits)).status_code == 200


@in_event_loop
async def test_the_target_of_a_request_may_be_a_url() -> None:
    async with front() as f:
        for target, status in ((b"http://a:1/v1/models?x=http://b/", b"200"), (b"https://a/health", b"200"), (b"http://a", b"200"),
                               (b"http://a//v1/models", b"404"), (b"http:/v1/models", b"404"), (b"http://a/none", b"404")):  # fmt: skip
            reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
            writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status, target
            writer.close()


@in_event_loop
async def test_a_body_that_announces_too_many_bytes_is_refused_before_it_arrives() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99999999999999999999\r\n\r\n"
    async with front() as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
        writer.write(head)
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 413")
        writer.close()
        assert await f.fine()


@in_event_loop
async def test_a_connection_is_free_at_once_after_a_refused_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last piece of the body was one too many, as there is nothing left to read and drop."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 60.0)  # the client gives up after 20
    async with front(max_parse_ms=1) as f:
        for count in (1_000, 20_000, 200_000):
            refused = await f.client.post("/v1/completions", content=b'{"prompt": [' + b"{}," * count + b"1]}")
            assert refused.status_code == 413
            assert await f.fine()


@in_event_loop
async def test_large_bodies_that_never_end_leave_room_for_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends most of a large body and waits takes its share of a bounded memory until it goes."""
    monkeypatch.setattr(limits, "MAX_LARGE_BODIES", 1)
    large = json.dumps({"prompt": "x"}).encode() + b" " * 900_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1048000\r\n\r\n"
    async with front(max_body_mib=1) as f:

        async def status() -> int:
            return (await f.client.post("/v1/completions", content=large)).status_code

        assert await status() == 200
        _, writer = await asyncio.open_connection("127.0.0.1", f.port)
        writer.write(head + b" " * 1_040_000)
        while (answer := await f.client.post("/v1/completions", content=large)).status_code == 200:
            await asyncio.sleep(0.01)
        assert answer.status_code == 429
        assert "request bodies" in error_of(answer)["message"]
        assert int(answer.headers["retry-after"]) > 0
        assert await f.fine()
        writer.close()
        while await status() == 429:
            await asyncio.sleep(0.01)
        assert await status() == 200


@in_event_loop
async def test_compressed_bodies_are_refused() -> None:
    async with front() as f:
        content = gzip.compress(b'{"prompt": "x"}')
        answer = await f.client.post("/v1/completions", content=content, headers={"content-encoding": "gzip"})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "Content-Encoding"
        assert await f.fine()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health?" + b"y" * 40_000 + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 431),
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
    ],
    ids=["endless", "whole", "query", "noise"],
)
@in_event_loop
async def test_large_headers_are_431_and_invalid_http_is_400(request_head: bytes, status: int) -> None:
    async with front() as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
        writer.write(request_head)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == str(status).encode()
        error = json.loads(body)["error"]
        assert (error["status"], error["code"]) == (status, "request_too_large" if status == 431 else None)
        assert await f.fine()


@in_event_loop
async def test_unknown_paths_and_methods_get_errors_in_openais_form() -> None:
    async with front() as f:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("POST", "/v1/images/generations", 404),
            ("GET", "/generate", 405),
            ("DELETE", "/health", 405),
        ):
            answer = await f.client.request(method, path)
            assert answer.status_code == status
            assert path in error_of(answer)["message"]
        for path, allowed, advice in (("/flush_cache", "GET, POST", "Use GET or POST."), ("/openapi.json", "GET, HEAD", "Use GET.")):
            refused = await f.client.options(path)
            assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
            assert error_of(refused)["message"].endswith(advice)


@in_event_loop
async def test_a_list_of_unknown_fields_is_cut_at_any_character() -> None:
    async with front() as f:
        for length in range(42, 48):
            body = {"prompt": "a", **{f"{i:02}" + "x" * (61 if i else length): 1 for i in range(20)}}
            answer = await f.post("/tokenize", body)
            assert (answer.status_code, len(answer.headers["x-ignored-fields"]) <= 1024) == (200, True)


@in_event_loop
async def test_a_url_in_a_message_opens_no_connection() -> None:
    trap = socket.create_server(("127.0.0.1", 0))
    trap.setblocking(False)
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
    async with front() as f:
        for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "file", "file": {"file_data": "file:///etc/hostname"}}):
            answer = await f.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
            assert answer.status_code == 400
            assert "messages[0].content[0]" in error_of(answer)["param"]
        assert (await f.post("/generate", {"text": "x", "image_data": url})).status_code == 400
    with pytest.raises(BlockingIOError):
        trap.accept()
    trap.close()


@in_event_loop
async def test_an_internal_error_is_a_500_without_details() -> None:
    async with front() as f:
        f.manager.tokenizer.encode_chat = lambda *args, **kwargs: 1 / 0  # type: ignore[attr-defined,method-assign]
        answer = await f.post("/v1/chat/completions", {"messages": HI})
        assert answer.status_code == 500
        assert "division" not in answer.text
        assert error_of(answer)["type"] == "server_error"
        assert await f.fine()


# ---- keys


@in_event_loop
async def test_all_routes_except_the_open_ones_need_the_key() -> None:
    async def check_all(open_paths: frozenset[str], protect_metrics: bool) -> None:
        manager = make_manager(ScriptedScheduler(), api_key="user", admin_api_key="admin", protect_metrics=protect_metrics)
        app = create_app(manager)
        paths = {str(route.path) for route in app.routes} | {"/nope", "/v1//models", "//", "/health/", "/%68ealth", "/v1/models/tiny"}  # type: ignore[attr-defined]
        assert paths >= OPEN_PATHS | PROBE_PATHS | ADMIN_PATHS
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://health/health") as client:
            for path in paths:
                for method in ("GET", "POST", "HEAD", "OPTIONS"):
                    url = httpx.URL("http://health").copy_with(raw_path=path.encode())
                    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic user"}, {"authorization": "user"}):
                        answer = await client.request(method, url, headers={**headers, "host": "x/health?"})
                        refused = answer.status_code == 401
                        assert refused == (path not in open_paths | {"/%68ealth"}), (method, path, answer.status_code)
        manager.close()

    await check_all(OPEN_PATHS | PROBE_PATHS, protect_metrics=False)
    await check_all(OPEN_PATHS, protect_metrics=True)


@in_event_loop
async def test_only_the_admin_key_opens_administration() -> None:
    async def statuses(key: str, **config: object) -> tuple[int, int]:
        async with front(**config) as f:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            user = await f.client.get("/v1/models", headers=headers)
            admin = await f.client.post("/flush_cache", headers=headers)
            return user.status_code, admin.status_code

    both = {"api_key": "user", "admin_api_key": "admin"}
    assert await statuses("user", **both) == (200, 401)
    assert await statuses("admin", **both) == (200, 200)
    assert await statuses("user", api_key="user") == (200, 200)
    assert await statuses("", admin_api_key="admin") == (200, 401)
    assert await statuses("", api_key=None) == (200, 200)


@in_event_loop
async def test_no_answer_contains_a_key() -> None:
    async with front(api_key="user-secret", admin_api_key="admin-secret") as f:
        for path in ("/get_server_info", "/get_model_info", "/metrics", "/openapi.json", "/"):
            answer = await f.client.get(path)
            assert answer.status_code == 200
            assert "secret" not in answer.text


# ---- clients that leave, lag or say nothing


@in_event_loop
async def test_leaving_a_stream_aborts_its_requests() -> None:
    async with front(ScriptedScheduler(gap=0.01, hold=5)) as f:
        for body, path in (
            (STREAM, "/v1/chat/completions"),
            ({"prompt": ["a", "b"], "stream": True, "n": 2}, "/v1/completions"),
            ({"text": "a", "stream": True}, "/generate"),
        ):
            async with f.client.stream("POST", path, json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
                assert f.manager.open_requests > 0
            await until(lambda: f.manager.open_requests == 0)
        assert len(f.scheduler.aborted) == 6


@in_event_loop
async def test_leaving_before_the_answer_aborts_its_requests() -> None:
    async with front(ScriptedScheduler(hold=0)) as f:
        for path, body in (
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/generate", {"text": "a"}),
        ):
            with pytest.raises(httpx.ReadTimeout):
                await f.client.post(path, json=body, timeout=0.2)
            await until(lambda: f.manager.open_requests == 0)
        assert len(f.scheduler.aborted) == 4


@in_event_loop
async def test_an_unread_stream_is_closed() -> None:
    closed: list[int] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"never"

    async def refuses(message: object) -> None:
        raise OSError("gone")

    stream = sse.EventStream(events(), lambda: closed.append(1))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="gone"):
        await stream({"type": "http"}, lambda: asyncio.Event().wait(), refuses)  # type: ignore[arg-type,return-value]
    assert closed == [1]


@in_event_loop
async def test_a_silent_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SILENCE_SECONDS", 0.1)
    async with front(ScriptedScheduler(gap=0.5)) as f:
        answer = await f.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 2})
        comments = [part for part in answer.text.split("\n\n") if part.startswith(":")]
        assert len(comments) >= 6
        assert answer.text.rstrip().endswith("data: [DONE]")


@in_event_loop
async def test_a_stalled_reader_is_cut_off_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.3)
    async with front(
        ScriptedScheduler(say=lambda request: "Hello, world" if request.input_ids == [120] else "y" * 20_000), context_length=40_000
    ) as f:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", f.port))
        f.manager.limits = dataclasses.replace(f.manager.limits, max_context_len=40_000, max_total_tokens=40_000)
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 20_000, "logprobs": 20}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        await asyncio.get_running_loop().sock_sendall(sock, head + body)
        await until(lambda: f.manager.open_requests == 1)
        assert await f.fine()
        await until(lambda: f.manager.open_requests == 0, 10)
        assert len(f.scheduler.aborted) == 1
        assert await f.fine()
        sock.close()


@in_event_loop
async def test_a_connection_without_complete_headers_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.2)
    async with front() as f:
        ordinary = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        for first, said in ((b"", b""), (b"", b"GET / HT"), (b"", b"GET / HTTP/1.1\r\nHost: a\r\n"), (ordinary, b"GET /hea")):
            reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
            writer.write(first)
            if first:
                await reader.readuntil(b'{"status":"ok"}')
            writer.write(said)
            assert await asyncio.wait_for(reader.read(), 3) == b""
            writer.close()
        assert await f.fine()


@pytest.mark.parametrize("timer", ["_expire", "timeout_keep_alive_handler"])
@in_event_loop
async def test_a_timer_before_the_read_resets_no_connection(timer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause of the process: the request has arrived, and the timer of the idle connection runs first."""
    monkeypatch.setattr(connection, "LAST_READ_SECONDS", 0.3, raising=False)
    made: list[connection.BoundedConnection] = []
    begin = connection.BoundedConnection.connection_made

    def remember(self: connection.BoundedConnection, transport: asyncio.Transport) -> None:
        begin(self, transport)
        made.append(self)

    monkeypatch.setattr(connection.BoundedConnection, "connection_made", remember)
    async with front() as f:
        sock = socket.create_connection(("127.0.0.1", f.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        await until(lambda: len(made) == 1)
        sock.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")  # at once, unlike `writer`
        getattr(made[0], timer)()
        assert await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 3)
        getattr(made[0], timer)()
        assert await asyncio.wait_for(reader.read(), 3) == b"", "an idle connection is closed"
        writer.close()


@in_event_loop
async def test_nagles_algorithm_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[int] = []
    take = connection.BoundedConnection.data_received

    def taking(self: connection.BoundedConnection, data: bytes) -> None:
        options.append(self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        take(self, data)

    monkeypatch.setattr(connection.BoundedConnection, "data_received", taking)
    async with front() as f:
        assert await f.fine()
    assert options
    assert all(options)


@in_event_loop
async def test_the_header_time_limit_does_not_cut_slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.1)
    async with front(ScriptedScheduler(gap=0.3)) as f:
        assert await f.fine()


@in_event_loop
async def test_an_incomplete_body_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    async with front() as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{"prompt')
        answer = await asyncio.wait_for(reader.read(), 3)
        assert answer.split()[1] == b"408"
        writer.close()


# ---- states of the server


async def refused(f: Front, status: int) -> None:
    for path, body in (("/v1/chat/completions", STREAM), ("/v1/completions", {"prompt": "x"}), ("/generate", {"text": "x"})):
        answer = await f.post(path, body)
        assert answer.status_code == status
        error_of(answer)


@in_event_loop
async def test_a_full_queue_is_429_with_retry_after() -> None:
    async with front(ScriptedScheduler(hold=0), max_queued_requests=1) as f:
        waiting = [asyncio.create_task(f.post("/generate", {"text": "x"})) for _ in range(9)]
        await until(lambda: f.manager.open_requests == 9)
        answer = await f.post("/v1/completions", {"prompt": "x"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert error_of(answer)["type"] == "rate_limit_error"
        assert f.manager.open_requests == 9
        await f.post("/abort_request", {"abort_all": True})
        assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}


@in_event_loop
async def test_more_prompts_than_the_queue_holds_are_400() -> None:
    async with front(max_queued_requests=2) as f:
        for path, body in (("/v1/completions", {"prompt": ["x"] * 11}), ("/generate", {"text": ["x"] * 11})):
            answer = await f.post(path, body)
            assert answer.status_code == 400
            assert "at most 10" in error_of(answer)["message"]
        answer = await f.post("/v1/completions", {"prompt": ["x", "x", [300]]})
        assert answer.status_code == 400
        await until(lambda: f.manager.open_requests == 0)


@in_event_loop
async def test_a_draining_server_refuses_new_requests_and_finishes_open_ones() -> None:
    async with front(ScriptedScheduler(gap=0.02)) as f:
        stream = asyncio.create_task(f.events("/v1/chat/completions", STREAM))
        await until(lambda: f.manager.open_requests == 1)
        f.manager.health.draining = True
        await refused(f, 503)
        assert (await f.client.get("/ready")).status_code == 503
        assert (await f.client.get("/health")).status_code == 200
        assert (await stream)[-1] == "[DONE]"


@in_event_loop
async def test_a_dead_process_ends_streams_with_errors_and_requests_with_503() -> None:
    async with front(ScriptedScheduler(hold=3)) as f:
        stream = asyncio.create_task(f.events("/v1/chat/completions", STREAM))
        whole = asyncio.create_task(f.post("/generate", {"text": "x"}))
        await until(lambda: f.manager.open_requests == 2)
        f.manager.process_died("scheduler")
        assert str(WorkerDied("scheduler")) in (await stream)[-1]["error"]["message"]
        assert (await whole).status_code == 503
        await refused(f, 503)
        for path in ("/health", "/ready", "/health_generate"):
            answer = await f.client.get(path)
            assert answer.status_code == 503
            error_of(answer)


@in_event_loop
async def test_health_generate_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.entrypoints.server.admin.GENERATE_SECONDS", 0.2)
    async with front() as f:
        assert (await f.client.get("/health_generate")).status_code == 200
        assert f.scheduler.requests[0].sampling.max_new_tokens == 1
        f.scheduler.hold = 0
        assert (await f.client.get("/health_generate")).status_code == 503
        await until(lambda: f.manager.open_requests == 0)


@in_event_loop
async def test_health_generate_accepts_tokens_of_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.entrypoints.server.admin.GENERATE_SECONDS", 1.0)
    monkeypatch.setattr("runtime.entrypoints.server.admin.LOOK_SECONDS", 0.05)

    async def probe(f: Front) -> int:
        asking = asyncio.create_task(f.client.get("/health_generate"))
        await until(lambda: len(f.scheduler.calls) > 1)
        f.scheduler.stats = SchedulerStats(generation_tokens_total=8)
        return (await asking).status_code

    async with front(ScriptedScheduler(hold=0, stats=SchedulerStats(generation_tokens_total=7))) as f:
        assert await probe(f) == 200
        await until(lambda: f.manager.open_requests == 0)
    full = ScriptedScheduler(hold=0, stats=SchedulerStats(generation_tokens_total=7))
    async with front(full, max_queued_requests=1) as f:
        waiting = [asyncio.create_task(f.post("/generate", {"text": "x"})) for _ in range(f.manager.limits.max_running_requests + 1)]
        await until(lambda: f.manager.open_requests == len(waiting))
        assert await probe(f) == 200
        full.stats = SchedulerStats(generation_tokens_total=7)
        assert (await f.client.get("/health_generate")).status_code == 503
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("steps", range(6))
@in_event_loop
async def test_a_health_check_ends_in_time_whatever_comes_just_then(steps: int) -> None:
    """Its look at the statistics must not take the cancellation for an answer that came `steps` steps of the loop before."""
    async with front(ScriptedScheduler()) as f:
        answer: asyncio.Future[SchedulerStats] = asyncio.get_running_loop().create_future()

        async def fetch() -> SchedulerStats:
            return await answer

        f.manager.fetch_stats = fetch  # type: ignore[method-assign]
        looking = asyncio.create_task(AdminApi(f.manager, None).fresh_stats())  # type: ignore[arg-type]
        for _ in range(3):
            await asyncio.sleep(0)
        answer.set_result(SchedulerStats())
        for _ in range(steps):
            await asyncio.sleep(0)
        if looking.cancel():
            with pytest.raises(asyncio.CancelledError):
                await looking
        else:
            assert steps > 1
            assert looking.result() == SchedulerStats()


# ---- information


@in_event_loop
async def test_server_info_hides_secrets() -> None:
    secrets = {"admin_api_key": "hidden-1", "ssl_keyfile_password": "hidden-2", "otlp_traces_endpoint": "http://me:hidden-3@host/v1/traces"}
    async with front(**secrets) as f:
        assert "hidden" not in (await f.client.get("/get_server_info", headers={"Authorization": "Bearer hidden-1"})).text


@in_event_loop
async def test_server_info_has_the_fields_that_benchmarks_read() -> None:
    stats = SchedulerStats(spec_by_context={"0": SpecStats(10, 30, 15, [9, 5, 1])}, decode=DecodeStats(4, 3, 9, 3))
    async with front(ScriptedScheduler(stats=stats)) as f:
        for path in ("/get_server_info", "/server_info"):
            info = (await f.client.get(path)).json()
            inner = info["internal_states"][0]
            assert info["avg_spec_accept_length"] == inner["avg_spec_accept_length"] == 2.5
            assert inner["per_position_acceptance"] == [0.9, 0.5, 0.1]
            assert (inner["spec_accept_rate"], inner["graph_hit_rate"], inner["padding_waste"]) == (0.5, 0.75, 0.25)
            assert info["page_size"] == 1
            assert "api_key" not in info
        assert (await f.client.get("/model_info")).json()["is_generation"] is True


@in_event_loop
async def test_profiles_go_to_the_servers_folder() -> None:
    async with front(profile_folder="/traces") as f:
        assert error_of(await f.post("/start_profile", {"num_steps": 5}))["param"] == "num_steps"
        started = await f.post(
            "/start_profile", {"output_dir": "/etc", "activities": ["CPU"], "num_steps": None, "profile_by_stage": False}
        )
        assert started.json() == {"success": True, "folder": "/traces"}
        for method in ("POST", "GET"):
            assert (await f.client.request(method, "/start_profile")).status_code == 200
            assert (await f.client.request(method, "/stop_profile")).status_code == 200
        calls = [(call.what, call.folder) for call in f.scheduler.calls]
        assert calls == [("start_profile", "/traces"), *[("start_profile", "/traces"), ("stop_profile", "")] * 2]
    async with front() as f:
        assert "--profile" in error_of(await f.post("/start_profile", {}))["message"]


@in_event_loop
async def test_leaving_while_a_trace_is_written_does_not_end_its_excuse() -> None:
    class Silent(ScriptedScheduler):
        def send(self, message: ToScheduler) -> None:
            assert isinstance(message, ControlReq)
            self.calls.append(message)

    async with front(Silent()) as f:
        with pytest.raises(httpx.ReadTimeout):
            await f.client.post("/stop_profile", json={}, timeout=0.2)
        assert (await f.client.get("/health")).status_code == 200
        assert f.manager.writes_trace
        f.manager.handle(ControlReply(call_id=f.scheduler.calls[0].call_id, result=ProfileAt(path="trace.json")))
        await until(lambda: not f.manager.writes_trace)


@in_event_loop
async def test_depth_and_synthetic_acceptance_are_set_while_the_server_runs() -> None:
    spec = tiny_speculative("", num_steps=7, num_draft_tokens=8, depths=(0, 1, 3, 7), synthetic_accept=(0.5,) * 7)
    async with front(speculative=spec) as f:
        for state in ({"speculative_num_steps": 3}, {"speculative_num_steps": "auto"}, {"speculative_synthetic_accept_length": 2.5}):
            assert (await f.post("/set_internal_state", {"server_args": state})).json() == {"success": True}
        depth, auto, accept = [call.speculation for call in f.scheduler.calls]
        assert (depth, auto) == (SpeculationChange(3), SpeculationChange(-1))
        assert accept.acceptance is not None
        assert sum(rate**i for i, rate in enumerate(accept.acceptance[:4])) == pytest.approx(2.5)
        for state, param in (
            ({"speculative_num_steps": -1}, "server_args.speculative_num_steps"),
            ({"speculative_synthetic_accept_length": "9"}, "speculative_synthetic_accept_length"),
            ({"speculative_synthetic_accept_length": {}}, "server_args.speculative_synthetic_accept_length"),
            ({"speculative_num_steps": 1, "max_running_requests": 4}, "server_args.max_running_requests"),
        ):
            refused = await f.post("/set_internal_state", {"server_args": state})
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    async with front() as f:
        refused = await f.post("/set_internal_state", {"server_args": {"speculative_num_steps": 1}})
        assert "--speculative-algorithm" in error_of(refused)["message"]


@in_event_loop
async def test_the_page_allows_only_its_own_script() -> None:
    page = await chat_page()
    html = bytes(page.body).decode()
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", " onclick="):
        assert forbidden not in html
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", html)
    assert not re.search(r"https?://", html)
