"""API keys, checked before any route sees the request.

A request sends its key as `Authorization: Bearer KEY` or `x-api-key: KEY`.

If a key is set, all paths except `OPEN_PATHS` and `PROBE_PATHS` need it; with --protect-metrics, `PROBE_PATHS` need it too. `/` is the
chat page, a static file in which the user enters the key.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.entrypoints.http.key_ring import KeyRing, KeyUse
from runtime.errors import NotAdmin, Unauthorized
from runtime.managers.request_context import CURRENT_CLIENT, Client

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
PROBE_PATHS = frozenset({"/health_generate", "/metrics"})
ADMIN_PATHS = frozenset({"/abort_request", "/flush_cache", "/set_internal_state", "/start_profile", "/stop_profile"})


class KeyGate:
    """ASGI middleware that refuses requests without a valid key and beyond the key's limits, and names the client by its key.

    An admin key opens all paths. Any other key opens all paths, except `ADMIN_PATHS` if there is an admin key. Without keys all paths
    are open. With --admin-api-key alone, only `ADMIN_PATHS` need a key.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, protect_metrics: bool) -> None:
        self.app = app
        self.ring = ring
        self.open = OPEN_PATHS if protect_metrics else OPEN_PATHS | PROBE_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises `Unauthorized`, `NotAdmin` or `KeyLimitReached`."""
        use = self.ring.find(_key_of(Headers(scope=scope)))
        if not self._opens(scope["path"], use):
            raise Unauthorized() if use is None else NotAdmin(scope["path"])
        if use is None:
            await self.app(scope, receive, send)
        else:
            await self._pass_on(use, scope, receive, send)

    async def _pass_on(self, use: KeyUse, scope: Scope, receive: Receive, send: Send) -> None:
        CURRENT_CLIENT.set(Client(use.client, use.key.priority))
        if scope["method"] != "POST" or scope["path"] in ADMIN_PATHS:
            await self.app(scope, receive, send)
            return
        use.begin()
        try:
            await self.app(scope, receive, send)
        finally:
            use.end()

    def _opens(self, path: str, use: KeyUse | None) -> bool:
        """Whether a key, or None, opens `path`."""
        if path in self.open:
            return True
        if path in ADMIN_PATHS and self.ring.has_admin:
            return use is not None and use.key.admin
        return use is not None or not self.ring.guards_api


def _key_of(headers: Headers) -> str:
    """The key that a request sends; empty for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()  # as Anthropic's clients send it
