"""The events of one OpenAI stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.entrypoints.http.sse import DONE, event
from runtime.entrypoints.openai.protocol import StreamOptions


class Chunks:
    """Encodes chunks that share a head, with usage where the client asked for it."""

    def __init__(self, head: dict[str, Any], options: StreamOptions, usage: Callable[[], dict[str, Any]]) -> None:
        self._head = head
        self._options = options
        self._usage = usage

    def choice(self, shown: dict[str, Any], **more: object) -> bytes:
        """The news of one choice."""
        chunk = {**self._head, "choices": [shown], **more}
        if self._options.include_usage:
            chunk["usage"] = self._usage() if self._options.continuous_usage_stats else None
        return event(chunk)

    def end(self) -> bytes:
        """The last chunk with the usage, if asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage()}) + DONE
