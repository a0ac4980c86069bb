"""The client whose request the current task serves: whom the fair queue counts it for."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec


class Client(msgspec.Struct, frozen=True):
    """One client.

    Attributes:
        name: of its API key, or its address; empty for the server's own requests.
        max_priority: the highest priority that counts against other clients; None: that of --max-priority.
    """

    name: str = ""
    max_priority: int | None = None


CURRENT: ContextVar[Client] = ContextVar("client", default=Client())  # noqa: B039  (it is frozen)
"""Set per request, before a handler runs."""
