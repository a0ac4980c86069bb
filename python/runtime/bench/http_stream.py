"""A small HTTP/1.1 client that timestamps every server-sent event when its bytes arrive.

A general client spends more time per streamed token than the server under test. This one only reads a socket through h11, splits lines and
calls a callback. Each request has its own connection, like the requests of independent users.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import h11

OnEvent = Callable[[bytes, float], None]

_MAX_HEADER_BYTES = _READ_BYTES = 65536
_ASCII = string.punctuation  # of a URL; other characters are percent-encoded


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


class _Events:
    """Splits the body of a stream into server-sent events, and passes their data to `on_event`."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event, self._line = on_event, b""

    def feed(self, piece: bytes, at: float) -> None:
        """Take a piece of the body that arrived at `at`."""
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), at)


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
            return await asyncio.wait_for(self._exchange(method, path, body, on_event), timeout)
        except (OSError, asyncio.TimeoutError) as error:
            why = str(error) or f"no answer within {timeout:.0f} s"
            raise HttpFailure(f"{self.endpoint.host}:{self.endpoint.port}: {why}") from error

    async def json(self, method: str, path: str, payload: Any = None, timeout: float = 60.0) -> Any:
        """Exchange JSON; raise HttpFailure for any status but 2xx. An answer that is not JSON is returned as text."""
        body = b"" if payload is None else json.dumps(payload).encode()
        status, answer = await self.exchange(method, path, body, timeout=timeout)
        text = answer.decode("utf-8", "replace")
        if not 200 <= status < 300:
            raise HttpFailure(f"{method} {self.endpoint.prefix}{path} answered {status}: {text[:500]}", status)
        try:
            return json.loads(text)
        except ValueError:
            return text

    async def _exchange(self, method: str, path: str, body: bytes, on_event: OnEvent | None) -> tuple[int, bytes]:
        connection = h11.Connection(h11.CLIENT, _MAX_HEADER_BYTES)
        request = self._render(connection, method, path, body)
        reader, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port, ssl=self._ssl)
        try:
            writer.write(request)
            return await _read(reader, connection, on_event and _Events(on_event))
        except h11.RemoteProtocolError as error:
            _, closed = connection.trailing_data
            raise HttpFailure("connection closed before the answer ended" if closed else f"malformed answer: {error}") from error
        finally:
            writer.close()

    def _render(self, connection: h11.Connection, method: str, path: str, body: bytes) -> bytes:
        """The bytes of a request. Raises `HttpFailure` for headers that HTTP does not allow."""
        fields = {
            "Host": self.endpoint.authority,
            "Connection": "close",
            "Accept": "*/*",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._headers,
        }
        target = quote(f"{self.endpoint.prefix}{path}", safe=_ASCII)
        try:
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
            events = h11.Request(method=method, target=target, headers=headers), h11.Data(data=body), h11.EndOfMessage()
            return b"".join(connection.send(event) or b"" for event in events)
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise HttpFailure(f"the request cannot be sent: {error}") from error


async def _read(reader: asyncio.StreamReader, connection: h11.Connection, events: _Events | None) -> tuple[int, bytes]:
    """Read one answer; returns its status and its body, which is empty if it was passed to `events`."""
    status, body, at = 0, bytearray(), 0.0
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            data = await reader.read(_READ_BYTES)
            at = time.perf_counter()
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and events is not None and status == 200:
            events.feed(event.data, at)
        elif isinstance(event, h11.Data):
            body += event.data
    return status, bytes(body)
