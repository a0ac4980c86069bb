"""API keys, checked before any route sees the request.

A request sends its key as `Authorization: Bearer KEY` or `x-api-key: KEY`.

With a key set, all paths except `OPEN_PATHS` and `PROBE_PATHS` need it; --protect-metrics closes the latter. `/` is the chat page,
a static file in which the user types the key.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.entrypoints.http.responses import error_response
from runtime.errors import Unauthorized
from runtime.managers.client import CURRENT, Client

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
PROBE_PATHS = frozenset({"/health_generate", "/metrics"})
ADMIN_PATHS = frozenset({"/abort_request", "/flush_cache", "/start_profile", "/stop_profile"})


class KeyGate:
    """ASGI middleware that answers 401 without the right key, and names the client by its key.

    The admin key opens all paths. The API key opens all paths, except `ADMIN_PATHS` if an admin key is set. Without keys all
    paths are open; with only an admin key, only `ADMIN_PATHS` need it.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None, protect_metrics: bool) -> None:
        self.app = app
        self.open = OPEN_PATHS if protect_metrics else OPEN_PATHS | PROBE_PATHS
        self.api = _digest(api_key)
        self.admin = _digest(admin_api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or answer 401."""
        if scope["type"] == "http" and not self._allows(scope):
            await error_response(Unauthorized(), scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        keys = self._keys_for(scope["path"])
        if not keys:
            return True
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # Anthropic's clients
        given = hashlib.sha256(key.strip().encode()).digest()
        # Compare all keys, so that the time does not depend on which key is close.
        fits = [hmac.compare_digest(given, want) for want in keys]
        if not any(fits):
            return False
        CURRENT.set(Client(f"key {given.hex()[:12]}"))
        return True

    def _keys_for(self, path: str) -> list[bytes]:
        """Digests of the keys that open `path`; an empty list means that it is open."""
        if path in self.open:
            return []
        if path in ADMIN_PATHS:
            return [key for key in ((self.admin,) if self.admin else (self.api,)) if key]
        return [key for key in (self.api, self.admin) if key] if self.api else []


def _digest(key: str | None) -> bytes | None:
    return hashlib.sha256(key.encode()).digest() if key else None
