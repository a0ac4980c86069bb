"""Renders large answers off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

T = TypeVar("T")

INLINE_CELLS = 2048
"""Answers with more log-probabilities are rendered in a thread; those of a full context take about a second."""


async def off_loop(cells: int, render: Callable[[], T]) -> T:
    """Call `render`, in a thread if its result has more than `INLINE_CELLS` log-probabilities and token ids (`cells`)."""
    return render() if cells <= INLINE_CELLS else await asyncio.to_thread(render)


def encoded(choice: Mapping[str, Any]) -> Any:
    """A choice encoded on its own and embedded in the answer unchanged, so that no single encoding takes long."""
    return orjson.Fragment(orjson.dumps(choice))
