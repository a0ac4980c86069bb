"""HTTP/1.1 connections with time limits for headers and for slow readers.

`BoundedConnection` uses private attributes of uvicorn's protocol: `conn`, `cycle`, `flow`, `connections` and `_should_upgrade`.
pyproject.toml pins the tested versions, and `check_version` asserts them.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from functools import partial
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.entrypoints.http.request_names import HEADER, new_request_id
from runtime.entrypoints.http.responses import error_body
from runtime.errors import ConfigError, ServingError, StatusError

log = logging.getLogger(__name__)

UVICORN = ((0, 34), (0, 54))
"""The first and the last tested version."""
HEADER_SECONDS = 10.0
"""Time limit from the start of the connection, or from the end of the last answer, to the end of the next headers."""
LAST_READ_SECONDS = 1.0
"""How long an idle connection stays open after its time limit. When a process that was paused (SIGSTOP, a frozen container) continues, its
timers run before it reads the requests that have arrived meanwhile, and closing a connection with unread data resets it.
"""
WRITE_SECONDS = 30.0
READ_BYTES = 16 * 1024
"""While its buffer is full, a client must read this much in each `WRITE_SECONDS`."""
PIPELINED_BYTES = 64 * 1024
"""How much of the next request is read while one is answered. Reading must continue to detect that the client disconnects."""
RESERVED_FILES = 64
"""File descriptors reserved for the server itself, at most a quarter of all. If no others are left, new connections replace idle ones."""
LINGER_SECONDS = 1.0
"""How long data from a refused client is read and discarded."""
MAX_HEADER_BYTES = 32 * 1024
"""Request line and headers together."""


class HeadersTooLarge(ServingError):
    """The headers are over the limit."""

    status = 431
    code = "request_too_large"

    def __init__(self) -> None:
        super().__init__(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")


def check_version() -> None:
    """Raise `ConfigError` if this file was not tested with the installed uvicorn."""
    major, minor = map(int, uvicorn.__version__.split(".")[:2])
    if not UVICORN[0] <= (major, minor) <= UVICORN[1]:
        wanted = f"uvicorn>=0.{UVICORN[0][1]},<0.{UVICORN[1][1] + 1}"
        raise ConfigError(f"The server was not tested with uvicorn {uvicorn.__version__}. Install another with pip install '{wanted}'.")


class BoundedConnection(H11Protocol):
    """uvicorn's h11 protocol with time limits and with errors in OpenAI's form."""

    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _refused = False
    opened = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = partial(_answer, self, self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timer. If connections use all file descriptors, close one connection."""
        super().connection_made(transport)
        self.opened = self.loop.time()
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= file_limit() - min(RESERVED_FILES, file_limit() // 4):
            self._make_room()
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Nagle's algorithm makes a token wait up to 40 ms for the acknowledgement of the previous one. asyncio turns it off only for
            # sockets that were created with an explicit protocol number.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process data. The header timer runs while the headers of a request are incomplete."""
        if self._refused:
            return
        super().data_received(data)
        self._read_on()
        self._watch()

    def handle_events(self) -> None:
        """Process requests. An empty line before a request is skipped, as servers should do (RFC 9112, 2.2)."""
        if self.conn.their_state is h11.IDLE and (data := self.conn.trailing_data[0]).startswith(b"\r\n"):
            self.conn = h11.Connection(h11.SERVER, MAX_HEADER_BYTES)  # h11 cannot drop received data
            if len(data) > 2:  # receiving nothing means the end of the connection
                self.conn.receive_data(data[2:])
        super().handle_events()

    def _should_upgrade(self) -> bool:
        """Stay with HTTP/1.1. Clients that prefer HTTP/2 ask with every request, for each of which uvicorn would log two warnings."""
        return False

    def _read_on(self) -> None:
        """Keep reading while a request is answered, even if the next one has begun; otherwise uvicorn would not notice a disconnect."""
        if self.conn.their_state is h11.DONE and self.flow.read_paused and len(self.conn.trailing_data[0]) < PIPELINED_BYTES:
            self.flow.resume_reading()

    def _make_room(self) -> None:
        """Close the idle connection that was opened first, or this one if all others are busy."""
        others = (one for one in self.connections if isinstance(one, BoundedConnection) and one is not self and one.idle)
        oldest = min(others, key=lambda one: one.opened, default=self)
        if oldest is self:
            log.warning("closed a new connection: the others are busy, and only %d files may be open (ulimit -n)", file_limit())
        oldest.transport.abort()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if not self.idle or self.transport.is_closing():
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = self.loop.call_later(LAST_READ_SECONDS, self._close_if_idle)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection unless its next request begins to arrive; data cancels the timer."""
        self.timeout_keep_alive_task = self.loop.call_later(LAST_READ_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._deadline = None
        if self.idle and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not an HTTP request; headers over the limit get 431."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # discards what the answer in progress still sends
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        large = len(self.conn.trailing_data[0]) > MAX_HEADER_BYTES
        error = HeadersTooLarge() if large else StatusError(400, "The request is not valid HTTP/1.1.")
        body = orjson.dumps(error_body(error))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        headers.append((HEADER.lower().encode(), new_request_id().encode()))
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing with unread data would reset the connection before the client sees the answer.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    async def write_chunk(self, data: bytes) -> None:
        """Send one chunk of an answer, as `RequestResponseCycle.send` does. h11 keeps no state for chunks."""
        cycle = self.cycle
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    # ---- slow readers

    def pause_writing(self) -> None:
        """Start the stall timer: 64 KiB or more are unread."""
        super().pause_writing()
        if self._stalled is None:
            self._expect_reading()

    def _expect_reading(self) -> None:
        self._stalled = self.loop.call_later(WRITE_SECONDS, self._cut_if_stalled, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the stall timer: the client has caught up."""
        super().resume_writing()
        self._stop_stall_timer()

    def _stop_stall_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cut_if_stalled(self, before: int) -> None:
        self._stalled = None
        if self.transport.get_write_buffer_size() <= before - READ_BYTES:
            self._expect_reading()
        else:
            self.transport.abort()  # close() would wait for the client to read the buffer


async def _answer(connection: BoundedConnection, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run `app` for one request. Chunks of an event stream bypass h11, which would take most of their time."""
    streams = False

    async def send_message(message: Message) -> None:
        nonlocal streams
        if streams and message.get("more_body") and (data := message["body"]):
            await connection.write_chunk(data)
            return
        await send(message)
        if message["type"] == "http.response.start":
            streams = scope["http_version"] == "1.1" and any(value.startswith(b"text/event-stream") for _, value in message["headers"])

    await app(_origin_form(scope), receive, send_message)


def _origin_form(scope: Scope) -> Scope:
    """The scope with the path alone, where a client sent the whole URL, as to a proxy; servers must accept it (RFC 9112, 3.2.2)."""
    if not scope["path"].startswith(("http://", "https://")):
        return scope
    path, raw = (part.split(slash, 3)[3:] for part, slash in ((scope["path"], "/"), (scope["raw_path"], b"/")))
    return {**scope, "path": "/" + "".join(path), "raw_path": b"/" + b"".join(raw)}


def file_limit() -> int:
    """The number of files that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
