"""The HTTP request that the current task serves: its name, and when its prompt was tokenised."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestContext:
    """One HTTP request.

    Attributes:
        request_id: its `X-Request-Id`; empty for the server's own requests.
        tokenized: monotonic seconds between which its prompts were tokenised, one pair per prompt.
        span: its span, if it is traced; only the tracer reads it.
    """

    request_id: str = ""
    tokenized: list[tuple[float, float]] = field(default_factory=list)
    span: Any = None


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""Set per request, before a handler runs; None outside of HTTP requests."""
