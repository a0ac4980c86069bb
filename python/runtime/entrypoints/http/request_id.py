"""The name of each HTTP request: the client's `X-Request-Id`, or a new one; every answer and its log lines carry it."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.log import REQUEST_ID
from runtime.managers.request_context import CURRENT_REQUEST, RequestContext

HEADER = "X-Request-Id"
_ACCEPTED = re.compile(r"[!-~]{1,128}")
"""Longer names, and those with other characters, are replaced: they go into logs and headers."""


class RequestId:
    """ASGI middleware that adds `X-Request-Id` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and name its answer."""
        given = Headers(scope=scope).get(HEADER, "")
        name = given if _ACCEPTED.fullmatch(given) else new_request_id()
        REQUEST_ID.set(name)
        CURRENT_REQUEST.set(RequestContext(name))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self.app(scope, receive, named)


def new_request_id() -> str:
    """A name in OpenAI's form."""
    return f"req_{uuid.uuid4().hex}"
