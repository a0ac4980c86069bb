"""Names the client of each request for the fair queue: by its API key, or by its address."""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.managers.request_context import CURRENT_CLIENT, Client


class ClientName:
    """ASGI middleware that names the client by its address; `KeyGate` names clients with a key."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        CURRENT_CLIENT.set(Client(address_name((scope.get("client") or ("",))[0])))
        await self.app(scope, receive, send)


def address_name(address: str) -> str:
    """The client of an address: an IPv6 client has all addresses of a /64 network.

    A socket for both versions shows IPv4 addresses as `::ffff:192.0.2.1`.
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
