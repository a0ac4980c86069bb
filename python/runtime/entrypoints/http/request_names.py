"""The id of each HTTP request, and the name of its client for the fair queue."""

from __future__ import annotations

import ipaddress
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.entrypoints.http.responses import ANTHROPIC_PATH
from runtime.log import REQUEST_ID
from runtime.managers.request_context import CURRENT_CLIENT, CURRENT_REQUEST, Client, RequestContext

HEADER = "X-Request-Id"
ANTHROPIC_HEADER = "request-id"
"""The header that Anthropic's clients read."""
_ACCEPTED = re.compile(r"[!-~]{1,128}")
"""Other ids are replaced, because ids appear in logs and headers."""


class RequestNames:
    """ASGI middleware that names a request and its client.

    Every answer and its log lines get a request id: the client's `X-Request-Id`, or a new one. The client is named by its address;
    `KeyGate` names clients with a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and add the id to its answer."""
        CURRENT_CLIENT.set(Client(address_name((scope.get("client") or ("",))[0])))
        given = Headers(scope=scope).get(HEADER, "")
        name = given if _ACCEPTED.fullmatch(given) else new_request_id()
        REQUEST_ID.set(name)
        CURRENT_REQUEST.set(RequestContext(name))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = name
                if scope["path"].startswith(ANTHROPIC_PATH):
                    headers[ANTHROPIC_HEADER] = name
            await send(message)

        await self.app(scope, receive, named)


def new_request_id() -> str:
    """A new request id in OpenAI's form."""
    return f"req_{uuid.uuid4().hex}"


def address_name(address: str) -> str:
    """The client name for an address. All addresses of an IPv6 /64 network are one client.

    A dual-stack socket shows IPv4 addresses as `::ffff:192.0.2.1`.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
