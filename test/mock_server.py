"""A mock server with configurable timings that speaks the APIs measured by `bench_serving`, over real sockets."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """The behaviour of the mock: `ttft` s before the first chunk, `gap` s between chunks, `per_chunk` tokens per chunk.

    `fail(number)` -> "" | "status" | "cut" | "error": how request `number` (from 0) fails. `stalled`: a path that gets no answer.
    `unknown`: paths that get status 404.
    """

    ttft: float = 0.1
    gap: float = 0.05
    per_chunk: int = 1
    fail: Callable[[int], str] = lambda number: ""
    spec: bool = False
    stalled: str = ""
    unknown: tuple[str, ...] = ()
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    sent_at: list[list[float]] = field(default_factory=list)  # per request: time of reading it, then of writing each chunk


class MockServer:
    """Answers `/generate`, `/v1/completions`, `/v1/chat/completions` and the information endpoints."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._answer(head.split(" ")[1], body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.script.calls.append(path)
        if path == self.script.stalled:
            await asyncio.sleep(3600)
        fixed = {
            "/ready": {},
            "/v1/models": {"data": [{"id": "mock"}]},
            "/get_model_info": {"vocab_size": 1000},
            "/get_server_info": {"internal_states": [{"avg_spec_accept_length": 9.0, "graph_hit_rate": 0.5}], "commit": "abc"},
            "/flush_cache": {},
            "/start_profile": {},
            "/stop_profile": {},
        }
        if path in fixed and path not in self.script.unknown:
            return await self._whole(writer, 200, fixed[path])
        if path not in ("/generate", "/v1/completions", "/v1/chat/completions"):
            return await self._whole(writer, 404, {"error": {"message": "no such path"}})
        number = len(self.script.requests)
        self.script.requests.append(body)
        self.script.sent_at.append([time.perf_counter()])
        how = self.script.fail(number)
        if how == "status":
            return await self._whole(writer, 500, {"error": {"message": "the mock refuses"}})
        if not body.get("stream"):
            return await self._plain(path, body, writer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        async for event in self._events(path, body, how, self.script.sent_at[number]):
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        if how != "cut":
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def _events(self, path: str, body: dict[str, Any], how: str, sent_at: list[float]) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        total, sent = _wanted(body), 0
        at = loop.time() + self.script.ttft
        if path == "/v1/chat/completions":
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        while sent < total:
            await asyncio.sleep(at - loop.time())
            at += self.script.gap
            new = min(self.script.per_chunk, total - sent)
            sent += new
            sent_at.append(time.perf_counter())
            yield self._chunk(path, new, sent, total)
            if how == "cut":
                return
            if how == "error":
                yield {"error": {"message": "the mock gave up"}}
                return
        if path != "/generate" and body.get("stream_options", {}).get("include_usage"):
            yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": sent}}
        yield "[DONE]"

    def _chunk(self, path: str, new: int, sent: int, total: int) -> dict[str, Any]:
        end = "length" if sent == total else None
        if path == "/generate":
            meta: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": sent, "finish_reason": {"type": end} if end else None}
            if self.script.spec:
                steps = (sent + self.script.per_chunk - 1) // self.script.per_chunk
                accepted = sent - 1 - steps  # the first token comes from the prompt, and one per step is the bonus token
                meta |= {"spec_verify_ct": steps, "spec_accepted_by_position": [min(steps, accepted), max(accepted - steps, 0)]}
            return {"text": "a " * sent, "meta_info": meta}
        if path == "/v1/completions":
            return {"choices": [{"text": "a " * new, "finish_reason": end}]}
        return {"choices": [{"delta": {"content": "a " * new}, "finish_reason": end}]}

    async def _plain(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        total = _wanted(body)
        await asyncio.sleep(self.script.ttft + self.script.gap * (total - 1))
        answer = self._chunk(path, total, total, total)
        await self._whole(writer, 200, answer | {"usage": {"prompt_tokens": 7, "completion_tokens": total}})

    async def _whole(self, writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()


def _wanted(body: dict[str, Any]) -> int:
    return body.get("max_tokens") or body.get("max_completion_tokens") or body["sampling_params"]["max_new_tokens"]


@contextmanager
def mock_server(script: Script) -> Iterator[int]:
    """Serve in its own thread; yield the port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(MockServer(script).handle, "127.0.0.1", 0), loop).result()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_close(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)


async def _close(server: asyncio.Server) -> None:
    server.close()
    answers = asyncio.all_tasks() - {asyncio.current_task()}
    for task in answers:
        task.cancel()
    await asyncio.gather(*answers, return_exceptions=True)


async def _serve(ttft: float, gap: float) -> None:
    server = await asyncio.start_server(MockServer(Script(ttft, gap)).handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":  # python mock_server.py TTFT GAP: serve in this process and print the port
    asyncio.run(_serve(float(sys.argv[1]), float(sys.argv[2])))
