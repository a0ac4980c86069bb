"""Limits of a request: the size of its headers, and the size, encoding and JSON depth of its body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.constrained.json_schema import deeper_than
from runtime.entrypoints.http.body_cost import BodyCost
from runtime.entrypoints.http.connection import MAX_HEADER_BYTES, HeadersTooLarge
from runtime.entrypoints.http.responses import error_response
from runtime.errors import BodiesFull, BodyTooComplex, BodyTooLarge, ClientTooSlow, RequestError

MIB = 1 << 20
MAX_DEPTH = 64
BODY_SECONDS = 120.0
"""Time limit from the end of the headers to the end of the body."""
LINGER_SECONDS = 10.0
LINGER_BYTES = 256 * MIB
"""How much of a refused body is read and discarded, because a client that is still sending does not read the answer."""
THREAD_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread."""
MAX_LARGE_BODIES = 32
"""How many bodies of the largest size may arrive at the same time."""


class BodyLimits:
    """The limits of request bodies, and of the memory of all bodies that are being read.

    The first `THREAD_BYTES` of each body do not count, so small bodies always fit.

    Attributes:
        max_mib: size of the largest body.
        max_parse_ms: the most milliseconds that the validation of a body may take.
    """

    def __init__(self, max_mib: int, max_parse_ms: int) -> None:
        self.max_mib, self.max_parse_ms = max_mib, max_parse_ms
        self._most, self._used = MAX_LARGE_BODIES * max_mib * MIB, 0

    @contextlib.contextmanager
    def reserve(self) -> Iterator[Callable[[int], None]]:
        """Reserve memory for one body. Yields a function to call with its new size when it grows; it raises `BodiesFull`."""
        held = 0

        def grow(size: int) -> None:
            nonlocal held
            more = max(0, size - THREAD_BYTES) - held
            if more and self._used + more > self._most:
                raise BodiesFull
            held, self._used = held + more, self._used + more

        try:
            yield grow
        finally:
            self._used -= held


class HeaderLimit:
    """ASGI middleware that refuses large headers, and requests with both Content-Length and Transfer-Encoding.

    The parser limits only headers that arrive in several reads.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises `HeadersTooLarge`."""
        if _head_bytes(scope) > MAX_HEADER_BYTES:
            raise HeadersTooLarge
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # A proxy may disagree with this server about where the body ends, and pass on a hidden request (RFC 9112, 6.1).
            answer = error_response(RequestError("Content-Length and Transfer-Encoding exclude each other."), scope["path"])
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) for name, value in scope["headers"])
    return len(scope.get("raw_path") or b"") + len(scope["query_string"]) + fields


class LingeringResponse(Response):
    """An answer that reads and discards the rest of the body, because a client that is still sending does not read the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        request = Request(scope, receive)
        if not getattr(request.state, "body_ended", False):
            with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect):
                await asyncio.wait_for(_drop(request), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})


async def _drop(request: Request) -> None:
    dropped = 0
    async for chunk in request.stream():
        dropped += len(chunk)
        if dropped > LINGER_BYTES:
            return


async def read_json(request: Request, limits: BodyLimits) -> object:
    """Read and parse the body.

    Raises:
        RequestError: the body is compressed, is not JSON in UTF-8, or is nested more than `MAX_DEPTH` levels deep.
        BodyTooLarge, BodyTooComplex, ClientTooSlow: it is too large, would take too long to validate, or did not arrive in time.
        BodiesFull: too many large bodies are arriving.
    """
    try:
        with limits.reserve() as grow:
            raw = await asyncio.wait_for(_read(request, limits, grow), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ClientTooSlow(f"The body did not end within {BODY_SECONDS:g} seconds.") from None
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestError("Content-Encoding is not supported. Send the JSON without compression.", "Content-Encoding")
    return parse_json(raw) if len(raw) <= THREAD_BYTES else await asyncio.to_thread(parse_json, raw)


async def _read(request: Request, limits: BodyLimits, grow: Callable[[int], None]) -> bytes:
    if int(request.headers.get("content-length", 0)) > limits.max_mib * MIB:  # the parser accepts only digits
        raise BodyTooLarge(limits.max_mib)
    chunks: list[bytes] = []
    cost, ended = BodyCost(), False
    while not ended:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, ended = message.get("body", b""), not message.get("more_body", False)
        request.state.body_ended = ended  # after the end, `LingeringResponse` would wait for a disconnect
        cost.feed(chunk)
        grow(cost.bytes)
        chunks.append(chunk)
        if cost.bytes > limits.max_mib * MIB:
            raise BodyTooLarge(limits.max_mib)
        if cost.milliseconds > limits.max_parse_ms:
            raise BodyTooComplex(cost.commas + cost.containers, limits.max_parse_ms)
    return b"".join(chunks)


def parse_json(raw: bytes) -> object:
    """Parse a body; an empty body counts as an empty object."""
    if not raw:
        return {}
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}." if _is_utf8(raw) else "The body is not UTF-8.") from None
    # A body with few brackets cannot be deeply nested, so only the others are walked.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise RequestError(f"The body is nested more than {MAX_DEPTH} levels deep.")
    return value


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
