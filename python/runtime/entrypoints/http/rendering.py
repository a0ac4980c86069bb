"""Renders large answers off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

T = TypeVar("T")

INLINE_CELLS = 2048
"""Answers with more log-probabilities are rendered in a thread: a context of them takes about a second."""


async def off_loop(cells: int, render: Callable[[], T]) -> T:
    """The result of `render`, which contains this many log-probabilities and token ids."""
    return render() if cells <= INLINE_CELLS else await asyncio.to_thread(render)


def encoded(choice: Mapping[str, Any]) -> Any:
    """A choice as JSON that goes into an answer as it is, so that no single encoding takes long."""
    return orjson.Fragment(orjson.dumps(choice))
