"""The events of one OpenAI stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.entrypoints.http.sse import DONE, event
from runtime.entrypoints.openai.protocol import OpenAIBody
from runtime.entrypoints.openai.usage import TokenCounts


class Chunks:
    """Encodes chunks with the same first fields, and with usage if the client requested it."""

    def __init__(self, head: dict[str, Any], body: OpenAIBody, counts: Callable[[], TokenCounts]) -> None:
        self._head = head
        self._body = body
        self._options = body.stream_options
        self._counts = counts

    def choice(self, shown: dict[str, Any], **more: object) -> bytes:
        """The chunk of one update of a choice."""
        chunk = {**self._head, "choices": [shown], **more}
        if self._options.include_usage and self._options.continuous_usage_stats:
            counts = self._counts()
            chunk.update(counts.extension(self._body), usage=counts.usage(self._body))
        elif self._options.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def end(self) -> bytes:
        """The last chunks, with the requested details and usage, and the end mark."""
        counts = self._counts()
        extension = counts.extension(self._body)
        last = event({**self._head, "choices": [], **extension}) if extension else b""
        if self._options.include_usage:
            last += event({**self._head, "choices": [], "usage": counts.usage(self._body)})
        return last + DONE
