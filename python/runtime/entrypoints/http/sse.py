"""Server-sent events, and work that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.entrypoints.http.responses import INTERNAL, error_body
from runtime.entrypoints.tasks import cancel
from runtime.errors import ServingError

log = logging.getLogger(__name__)

SILENCE_SECONDS = 15.0
"""Send a comment after this long without an event, so that proxies keep the connection open."""
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

T = TypeVar("T")


def event(value: object) -> bytes:
    """One JSON value as an event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_events(values: Iterable[dict[str, Any]]) -> bytes:
    """JSON objects as events, each named by its `type`."""
    return b"".join(b"event: " + value["type"].encode() + b"\n" + event(value) for value in values)


class EventStream(Response):
    """Sends events as they are produced; an error becomes the last event.

    Args:
        events: encoded events.
        close: stops the work that produces the events; always called.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Without this header the body is sent in chunks.
        del self.headers["content-length"]
        self.events = events
        self.close = close
        self.latest = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client disconnects, then call `close`."""
        tasks: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            tasks = [asyncio.create_task(work) for work in (self._write(send), gone(receive), self._keep_alive(send))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # An async generator that has not started does not run its own cleanup.
            self.close()
            await cancel(*tasks)
            await self.events.aclose()
        if not tasks[0].cancelled():
            tasks[0].result()
            await send({"type": "http.response.body", "body": b""})

    async def _write(self, send: Send) -> None:
        try:
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self.latest = time.monotonic()
        except Exception as error:
            failure = stream_failure(error)
            await send({"type": "http.response.body", "body": event(error_body(failure)), "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent = time.monotonic() - self.latest
            if silent >= SILENCE_SECONDS:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                self.latest, silent = time.monotonic(), 0.0
            await asyncio.sleep(SILENCE_SECONDS - silent)


def stream_failure(error: Exception) -> ServingError:
    """The error that ends a stream. Log an unexpected one; call it while `error` is handled."""
    if isinstance(error, ServingError):
        return error
    log.exception("a stream failed")
    return ServingError(INTERNAL)


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await cancel(task, left)


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
