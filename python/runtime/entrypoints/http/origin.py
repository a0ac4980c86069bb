"""Refuses requests that a web page of another site makes a browser send.

Such a page can reach a server on the user's machine in two ways: a form or script sends a request without seeing the answer, or, by DNS
rebinding, the page's own name resolves to the server's address, and the browser lets the page read the answers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.entrypoints.http.auth import ADMIN_PATHS
from runtime.errors import StatusError, shown

PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".test", ".home.arpa")
"""Names with these suffixes are not in the public DNS, so no web page can have them."""
JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""Content types accepted for a JSON body. The last is curl's default; a browser that sends it also sends an Origin."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]*)?")


class OriginGate:
    """ASGI middleware that checks Host, Origin and Content-Type.

    Args:
        hosts: public names by which clients reach the server; addresses and private names are always allowed. None allows any name.
        origins: origins whose pages may use the API; "*" allows all.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None, origins: Sequence[str]) -> None:
        self.app = app
        self._hosts = None if hosts is None else frozenset(name.lower() for name in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises a `StatusError` of status 403 or 415."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._knows(host):
            raise StatusError(403, f"The Host {shown(host)} is not a name of this server. Add it, without a port, to --allowed-hosts.")
        writes = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        site = headers.get("sec-fetch-site", "none")
        foreign = not self._allows(origin, host) if origin is not None else site not in ("none", "same-origin")
        if foreign and "*" not in self._origins and (writes or scope["path"] in ADMIN_PATHS):
            raise StatusError(403, "Pages of another origin may not use this server. Add the origin to --allow-origins.")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if writes and kind not in JSON_TYPES and not kind.endswith("+json"):
            raise StatusError(415, f"The Content-Type must be application/json; got {shown(kind)}.")
        await self.app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        if self._hosts is None or "*" in self._hosts or not host:
            return True
        name = _host_name(host)
        return name in self._hosts or "." not in name or name.endswith(PRIVATE_SUFFIXES) or _is_address(name)

    def _allows(self, origin: str, host: str) -> bool:
        """Whether pages of `origin` may send requests: it is in the list, or it is the server's own."""
        return origin in self._origins or origin.partition("://")[2].lower() == host.lower() != ""


def _host_name(host: str) -> str:
    """The name in a Host header, without the port; for a malformed header, a name that no server can have."""
    found = _HOST.fullmatch(host.lower())
    return found[1].strip("[]").rstrip(".") if found else "invalid.example"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
