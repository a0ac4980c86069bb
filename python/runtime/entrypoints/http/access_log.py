"""The log line of every HTTP request (--log-requests)."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.log import REQUEST_ID
from runtime.managers.request_context import CURRENT_CLIENT

log = logging.getLogger(__name__)

NO_ANSWER = 499
"""nginx's status for a client that disconnected before the answer began."""


class AccessLog:
    """ASGI middleware that logs method, path, status, duration, size, client and id of a request once its answer is complete."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        began, status, sent = time.monotonic(), NO_ANSWER, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            seconds, path = round(time.monotonic() - began, 4), scope["path"][:200].encode("unicode_escape").decode()
            client = CURRENT_CLIENT.get().name
            shown = {
                "method": scope["method"],
                "path": path,
                "status": status,
                "seconds": seconds,
                "bytes": sent,
                "client": client,
            }
            what = f"{scope['method']} {path} {status}"
            log.info("%s %.3f s %d bytes %s %s", what, seconds, sent, client or "-", REQUEST_ID.get(), extra={"fields": shown})
