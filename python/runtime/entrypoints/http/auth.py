"""Who may call what: API keys, checked before any route sees the request.

Default deny: with a key set, every path needs it but those of `OPEN_PATHS`. `/health` and `/ready` are for probes that hold no
key; `/` is the chat page, one static file without data, in which the user types the key.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.entrypoints.http.responses import error_response
from runtime.errors import Unauthorized

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
ADMIN_PATHS = frozenset({"/abort_request", "/flush_cache", "/start_profile", "/stop_profile"})


class KeyGate:
    """ASGI middleware: 401 without the right key.

    The API key opens all but `ADMIN_PATHS` where an admin key is set; the admin key opens everything. Without any key set all is
    open; with only an admin key, only `ADMIN_PATHS` are closed.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None) -> None:
        self.app = app
        self.api = _digest(api_key)
        self.admin = _digest(admin_api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and not self._allows(scope):
            await error_response(Unauthorized())(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        keys = self._keys_for(scope["path"])
        if not keys:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        # Every key is compared, so that the time tells nothing about which one came near.
        fits = [hmac.compare_digest(given, want) for want in keys]
        return scheme.lower() == "bearer" and any(fits)

    def _keys_for(self, path: str) -> list[bytes]:
        """Digests of the keys that open `path`; none means it is open."""
        if path in OPEN_PATHS:
            return []
        if path in ADMIN_PATHS:
            return [key for key in ((self.admin,) if self.admin else (self.api,)) if key]
        return [key for key in (self.api, self.admin) if key] if self.api else []


def _digest(key: str | None) -> bytes | None:
    return hashlib.sha256(key.encode()).digest() if key else None
