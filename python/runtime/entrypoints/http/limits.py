"""Limits of a request: the size of its headers, and the size, encoding and JSON depth of its body."""

from __future__ import annotations

import asyncio

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.entrypoints.http.connection import HEADERS_TOO_LARGE, MAX_HEADER_BYTES
from runtime.entrypoints.http.responses import error_response
from runtime.errors import BodyTooLarge, RequestError, ServingError

MIB = 1 << 20
MAX_BODY_MIB = 32
MAX_DEPTH = 64
BODY_SECONDS = 120.0
"""From the end of the headers to the end of the body."""
LINGER_SECONDS = 10.0
LINGER_BYTES = 256 * MIB
"""How much of a refused body is read and dropped, because a client that is still sending does not read the answer."""
THREAD_BYTES = 256 * 1024
"""Larger bodies are parsed in a thread."""


class BadBody(RequestError):
    """The body is not JSON, or is nested too deeply, or is compressed."""


class HeadersTooLarge(ServingError):
    """The headers are over the limit."""

    status = 431
    kind = "invalid_request_error"


class BodyTimeout(ServingError):
    """The client stopped sending in the middle of its body."""

    status = 408
    kind = "invalid_request_error"


class BodyLimit:
    """ASGI middleware that counts the body while it arrives and ends the request at the limit.

    It counts the headers too, because the parser bounds only headers that arrive in several reads.
    """

    def __init__(self, app: ASGIApp, max_mib: int = MAX_BODY_MIB) -> None:
        self.app = app
        self.max_mib = max_mib

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a counting `receive`."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is None:
            await self._counted(scope, receive, send)
        else:
            await error_response(refused)(scope, receive, _lingering(receive, send))

    def _refusal(self, scope: Scope) -> ServingError | None:
        """The error of a request whose headers are reason enough to refuse it."""
        headers = Headers(scope=scope)
        if _head_bytes(scope) > MAX_HEADER_BYTES:
            return HeadersTooLarge(HEADERS_TOO_LARGE)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            return BadBody("Content-Encoding is not supported. Send the JSON without compression.", "Content-Encoding")
        return BodyTooLarge(self.max_mib) if _announced(headers) > self.max_mib * MIB else None

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        left, over = self.max_mib * MIB, False

        async def counting() -> Message:
            nonlocal left, over
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                over = True
                raise BodyTooLarge(self.max_mib)
            return message

        lingering = _lingering(receive, send)

        async def answering(message: Message) -> None:
            await (lingering if over else send)(message)

        await self.app(scope, counting, answering)


def _head_bytes(scope: Scope) -> int:
    return len(scope.get("raw_path") or b"") + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])


def _announced(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def _lingering(receive: Receive, send: Send) -> Send:
    """A `send` that reads the rest of the request before it ends the answer."""

    async def lingering(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})

    return lingering


async def _discard(receive: Receive) -> None:
    """Read and drop the rest of the body, up to `LINGER_BYTES` and `LINGER_SECONDS`."""

    async def drop() -> None:
        dropped = 0
        while dropped < LINGER_BYTES:
            message = await receive()
            dropped += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return

    try:
        await asyncio.wait_for(drop(), LINGER_SECONDS)
    except asyncio.TimeoutError:
        return


async def read_json(request: Request) -> object:
    """Read and parse the body.

    Raises:
        BadBody: the body is not JSON in UTF-8 or is nested more than `MAX_DEPTH` levels deep.
        BodyTooLarge, BodyTimeout: it is too large or did not arrive in time.
    """
    raw = await _read(request)
    if len(raw) <= THREAD_BYTES:
        return parse_json(raw)
    return await asyncio.to_thread(parse_json, raw)


async def _read(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(_chunks(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise BodyTimeout(f"The body did not end within {BODY_SECONDS:g} seconds.") from None


async def _chunks(request: Request) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_json(raw: bytes) -> object:
    """Parse a body; an empty body counts as an empty object."""
    if not raw:
        return {}
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"The body is not valid JSON in UTF-8: {error}.") from None
    # A body with few brackets cannot be deep, so only the others are walked.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise BadBody(f"The body is nested more than {MAX_DEPTH} levels deep.")
    return value


def deeper_than(value: object, limit: int) -> bool:
    """Whether arrays and objects are nested more than `limit` levels deep."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(limit):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, (list, dict))]
        if not level:
            return False
    return bool(level)
