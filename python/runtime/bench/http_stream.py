"""A small HTTP/1.1 client that timestamps every server-sent event when its bytes arrive.

A general client spends more time per streamed token than the server under test. This one only reads a socket, splits lines and calls a
callback. Each request has its own connection, like the requests of independent users.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

OnEvent = Callable[[bytes, float], None]

_MAX_HEADER_BYTES = 65536


class HttpFailure(Exception):
    """The exchange was interrupted, or the server answered with an error status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def authority(host: str, port: int) -> str:
    """Host and port for URLs and `Host` headers, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed base URL."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> Endpoint:
        """Parse `http://host:port/prefix`; raise ValueError for anything but http and https."""
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ValueError(f"the server's address {base_url!r} is invalid: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"the server's address {base_url!r} is not of the form http://host:port")
        return cls(parts.scheme, host, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port for the `Host` header, with an IPv6 address in brackets."""
        return authority(self.host, self.port)


class _Exchange(asyncio.Protocol):
    """One request and its answer. `done` has the result (status, body) when the answer is complete.

    With `on_event`, it is called with the events of a 200 answer as they arrive, and `body` stays empty.
    """

    def __init__(self, request: bytes, on_event: OnEvent | None) -> None:
        self._request = request
        self._on_event = on_event
        self._buffer = bytearray()
        self._line = bytearray()
        self._body = bytearray()
        self._status = 0
        self._chunked = False
        self._left = -1  # remaining bytes of the body or of the current chunk; -1: unknown
        self._in_body = False
        self._transport: asyncio.WriteTransport | None = None
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        try:
            if not self._in_body:
                self._read_head()
            if self._in_body:
                self._read_body(now)
        except HttpFailure as error:
            self._fail(error)
        except Exception as error:  # otherwise the event loop only logs the error, and the request hangs
            self._fail(HttpFailure(f"malformed answer: {type(error).__name__}: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if self._in_body and not self._chunked and self._left < 0 and exc is None:
            self._finish()
        else:
            self._fail(HttpFailure(f"connection closed before the answer ended{f': {exc}' if exc else ''}"))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def _read_head(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEADER_BYTES:
                raise HttpFailure("answer header is longer than 64 KiB")
            return
        first, *rest = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self._status = int(first.split(" ", 2)[1])
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if not self._chunked and "content-length" in fields:
            self._left = int(fields["content-length"])
        self._in_body = True

    def _read_body(self, now: float) -> None:
        if not self._chunked:
            self._take(bytes(self._buffer), now)
            if self._left >= 0:
                self._left -= len(self._buffer)
            self._buffer.clear()
            if self._left == 0:
                self._finish()
            return
        while not self.done.done():
            if self._left < 0:
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    return
                self._left = int(bytes(self._buffer[:end]).split(b";")[0], 16)
                del self._buffer[: end + 2]
                if self._left == 0:
                    self._finish()
                    return
            if len(self._buffer) < self._left + 2:
                return
            self._take(bytes(self._buffer[: self._left]), now)
            del self._buffer[: self._left + 2]
            self._left = -1

    def _take(self, piece: bytes, now: float) -> None:
        if self._on_event is None or self._status != 200:
            self._body += piece
            return
        self._line += piece
        *lines, rest = self._line.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(bytes(line[5:].strip()), now)
        self._line = bytearray(rest)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, bytes(self._body)))
        self.close()

    def _fail(self, error: HttpFailure) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        self.close()


class HttpClient:
    """Sends requests to one server."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        self.endpoint = Endpoint.parse(base_url)
        self._headers = dict(headers or {})
        self._ssl = ssl.create_default_context() if self.endpoint.scheme == "https" else None

    async def exchange(
        self, method: str, path: str, body: bytes = b"", on_event: OnEvent | None = None, timeout: float = 21600.0
    ) -> tuple[int, bytes]:
        """Send one request and read its answer.

        Args:
            method: GET or POST.
            path: path of the endpoint below the base URL.
            body: JSON text.
            on_event: called with (data, time) for each event of a 200 answer.
            timeout: seconds for the whole exchange.

        Returns:
            The status and the body, which is empty if events were delivered.

        Raises:
            HttpFailure: no connection, a time-out, or an incomplete answer.
        """
        try:
            return await asyncio.wait_for(self._exchange(self._render(method, path, body), on_event), timeout)
        except (OSError, asyncio.TimeoutError) as error:
            why = str(error) or f"no answer within {timeout:.0f} s"
            raise HttpFailure(f"{self.endpoint.host}:{self.endpoint.port}: {why}") from error

    async def json(self, method: str, path: str, payload: Any = None, timeout: float = 60.0) -> Any:
        """Exchange JSON; raise HttpFailure for any status but 2xx. An answer that is not JSON is returned as text."""
        body = b"" if payload is None else json.dumps(payload).encode()
        status, answer = await self.exchange(method, path, body, timeout=timeout)
        text = answer.decode("utf-8", "replace")
        if not 200 <= status < 300:
            raise HttpFailure(f"{method} {path} answered {status}: {text[:500]}", status)
        try:
            return json.loads(text)
        except ValueError:
            return text

    async def _exchange(self, request: bytes, on_event: OnEvent | None) -> tuple[int, bytes]:
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: _Exchange(request, on_event), self.endpoint.host, self.endpoint.port, ssl=self._ssl
        )
        try:
            return await protocol.done
        finally:
            protocol.close()

    def _render(self, method: str, path: str, body: bytes) -> bytes:
        fields = {
            "Host": self.endpoint.authority,
            "Connection": "close",
            "Accept": "*/*",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {self.endpoint.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
