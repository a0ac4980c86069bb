"""Context variables of the current task: the HTTP request that it serves, and its client."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(slots=True)
class RequestContext:
    """One HTTP request.

    Attributes:
        request_id: its `X-Request-Id`; empty for the server's own requests.
        tokenized: when the tokenisation of each prompt began and ended, in monotonic seconds.
        span: its OpenTelemetry span, if it is traced; only the tracer reads it.
    """

    request_id: str = ""
    tokenized: list[tuple[float, float]] = field(default_factory=list)
    span: Any = None


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""Set per request, before a handler runs; None outside of HTTP requests."""


class Client(msgspec.Struct, frozen=True):
    """One client.

    Attributes:
        name: the name of its API key, or its address; empty for the server's own requests.
        max_priority: the highest priority that counts against other clients; None: the value of --max-priority.
    """

    name: str = ""
    max_priority: int | None = None


CURRENT_CLIENT: ContextVar[Client] = ContextVar("client", default=Client())  # noqa: B039  (it is frozen)
"""Set per request, before a handler runs."""
