"""Connections that send odd bytes, read slowly, or are too many."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext, suppress

import pytest
from front import Front, ScriptedScheduler, front, until

from event_loop import in_event_loop
from runtime.entrypoints.http import connection
from runtime.errors import ConfigError


async def opened(f: Front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", f.port)


async def raw(f: Front, data: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    reader, writer = await opened(f)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


@in_event_loop
async def test_a_body_with_two_lengths_is_refused() -> None:
    async with front() as f:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await raw(f, head + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert await f.fine()


@pytest.mark.parametrize("together", [True, False])
@in_event_loop
async def test_an_empty_line_before_a_request_is_skipped(together: bool) -> None:
    async with front() as f:
        body = b'{"prompt": "x"}'
        request = b"\r\nPOST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        last = b"\r\nGET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        reader, writer = await opened(f)
        for part in [request * 2 + last] if together else [b"\r\n", request[2:], b"\r\n", request[2:], last]:
            writer.write(part)
            await asyncio.sleep(0.05)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.count(b"HTTP/1.1 200") == 3
        assert (await raw(f, b"\r\n" + last)).startswith(b"HTTP/1.1 400"), "two empty lines"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@in_event_loop
async def test_an_upgrade_is_not_made_and_not_logged(protocol: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with front() as f:
        caplog.clear()
        head = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: %s\r\n\r\n" % protocol
        assert (await raw(f, head)).startswith(b"HTTP/1.1 200")
        assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("path", [b"/health", b"/get_server_info"])
@in_event_loop
async def test_a_bad_chunk_is_a_400_without_a_traceback(path: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with front() as f:
        answer = await raw(f, b"GET %s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n" % path)
        assert answer.startswith(b"HTTP/1.1 400") or answer.startswith(b"HTTP/1.1 200")
        assert await f.fine()
    assert not [record for record in caplog.records if record.exc_info]


@in_event_loop
async def test_leaving_after_a_pipelined_byte_aborts_the_request() -> None:
    scheduler = ScriptedScheduler(hold=0)
    async with front(scheduler) as f:
        _, writer = await opened(f)
        body = b'{"prompt": "x"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: f.manager.open_requests == 1)
        writer.write(b"G")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await until(lambda: f.manager.open_requests == 0)
        assert len(scheduler.aborted) == 1


@pytest.mark.parametrize("stream", [b"false", b"true"])
@in_event_loop
async def test_closing_the_sending_side_aborts_the_request(stream: bytes) -> None:
    scheduler = ScriptedScheduler(hold=0)
    async with front(scheduler) as f:
        reader, writer = await opened(f)
        body = b'{"prompt": "x", "stream": %s}' % stream
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: f.manager.open_requests == 1)
        writer.write_eof()
        await until(lambda: f.manager.open_requests == 0)
        assert len(scheduler.aborted) == 1
        assert b"[DONE]" not in await asyncio.wait_for(reader.read(), 10)
        writer.close()


@in_event_loop
async def test_a_slow_reader_of_a_large_answer_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", 1.0)
    async with front(max_queued_tokens=4 << 20) as f:
        prompt = "a" * (2 << 20)
        body = b'{"prompt": "%s"}' % prompt.encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port, limit=16384)
        head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await writer.drain()
        total = 0
        while chunk := await asyncio.wait_for(reader.read(1 << 17), 20):
            total += len(chunk)
            await asyncio.sleep(0.05)
        assert total > 6 << 20  # "97," per letter
        writer.close()


@in_event_loop
async def test_idle_connections_make_room_for_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(ScriptedScheduler(hold=0)) as f:
        busy = asyncio.create_task(f.post("/v1/completions", {"prompt": "x", "stream": True}))
        await until(lambda: f.manager.open_requests == 1)
        first_free = os.dup(0)
        os.close(first_free)
        monkeypatch.setattr(connection, "file_limit", lambda: (first_free + 20) * 4 // 3)
        crowd = [await opened(f) for _ in range(60)]
        assert (await f.client.get("/health")).status_code == 200
        closed = [await asyncio.wait_for(reader.read(), 5) for reader, _ in crowd[:5]]
        assert closed == [b""] * 5, "those opened first were closed"
        assert not any(reader.at_eof() for reader, _ in crowd[-5:]), "a small limit leaves room for some"
        assert f.manager.open_requests == 1, "the busy one was kept"
        for _, writer in crowd:
            writer.close()
        busy.cancel()


@in_event_loop
async def test_a_connection_for_which_no_file_is_left_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with front(ScriptedScheduler(hold=0)) as f:
        busy = asyncio.create_task(f.post("/v1/completions", {"prompt": "x", "stream": True}))
        await until(lambda: f.manager.open_requests == 1)
        monkeypatch.setattr(connection, "file_limit", lambda: 4)
        reader, _ = await opened(f)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        busy.cancel()
    assert "closed a new connection: the others are busy, and only 4 files may be open (ulimit -n)" in caplog.text


@pytest.mark.parametrize(("version", "framed"), [(b"1.0", False), (b"1.1", True)])
@in_event_loop
async def test_a_stream_is_framed_as_its_version_of_http_wants(version: bytes, framed: bool) -> None:
    async with front() as f:
        body = b'{"prompt": "x", "stream": true}'
        head = b"POST /v1/completions HTTP/%s\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        answer = await raw(f, head % (version, len(body)) + body)
        headers, _, stream = answer.partition(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in headers.lower()) == framed
        if framed:
            pieces, stream = stream, b""
            while pieces:
                size, _, rest = pieces.partition(b"\r\n")
                stream += rest[: int(size, 16)]
                assert rest[int(size, 16) :][:2] == b"\r\n"
                pieces = rest[int(size, 16) + 2 :]
        events = stream.split(b"\n\n")
        assert len(events) > 10
        assert events[-2:] == [b"data: [DONE]", b""]
        assert all(event.startswith(b"data: ") for event in events[:-1])


@pytest.mark.parametrize(("version", "fits"), [("0.33.9", False), ("0.34.0", True), ("0.54.2", True), ("0.55.0", False), ("1.0.0", False)])
def test_versions_of_uvicorn_that_were_not_tested_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    monkeypatch.setattr(connection.uvicorn, "__version__", version)
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"pip install 'uvicorn>=0\.34,<0\.55'"):
        connection.check_version()
