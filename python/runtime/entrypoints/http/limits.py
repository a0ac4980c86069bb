"""Bounds of a request: its headers, and the size of its body while it streams in, its coding, the depth of its JSON."""

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
"""How much of a refused body is read and thrown away, so that a client that is still sending gets to see the answer."""
THREAD_BYTES = 256 * 1024
"""Larger bodies are parsed in a thread."""


class BadBody(RequestError):
    """The body is not a JSON value that the server reads."""


class HeadersTooLarge(ServingError):
    """More headers than the server reads."""

    status = 431
    kind = "invalid_request_error"


class BodyTimeout(ServingError):
    """The client stopped in the middle of its body."""

    status = 408
    kind = "invalid_request_error"


class BodyLimit:
    """ASGI middleware: counts the body as it comes in, and ends the request at the limit.

    Headers are counted too: the parser bounds those that are incomplete, and takes whatever comes whole in one read.
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
        """What its headers alone tell against a request."""
        headers = Headers(scope=scope)
        if _head_bytes(scope) > MAX_HEADER_BYTES:
            return HeadersTooLarge(HEADERS_TOO_LARGE)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            return BadBody("Content-Encoding: compressed bodies are refused; send the JSON as it is", param="Content-Encoding")
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
    """A `send` that takes in the rest of the request before it ends the answer."""

    async def lingering(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})

    return lingering


async def _discard(receive: Receive) -> None:
    """Read and drop the rest of the body, within bounds."""

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
        BadBody: not UTF-8, not JSON, or nested more than `MAX_DEPTH` deep.
        BodyTooLarge, BodyTimeout: it is too long, or its sender stopped.
    """
    raw = await _read(request)
    if len(raw) <= THREAD_BYTES:
        return parse_json(raw)
    return await asyncio.to_thread(parse_json, raw)


async def _read(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(_chunks(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise BodyTimeout(f"the body did not end within {BODY_SECONDS:g} seconds") from None


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
    """Parse a body; an empty one is an empty object."""
    if not raw:
        return {}
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"the body is not valid JSON in UTF-8: {error}") from None
    # A body with few brackets cannot be deep; the exact walk is for the others.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise BadBody(f"the body is nested more than {MAX_DEPTH} levels deep")
    return value


def deeper_than(value: object, limit: int) -> bool:
    """Whether lists and objects are nested more than `limit` deep."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(limit):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, (list, dict))]
        if not level:
            return False
    return bool(level)
