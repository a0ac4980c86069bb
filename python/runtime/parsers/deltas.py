"""The typed deltas of a chat's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call; `call` is its index in the answer, from 0."""

    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of a started call's arguments."""

    call: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Merge adjacent deltas of the same kind, and drop empty ones."""
    if not deltas or (len(deltas) == 1 and (isinstance(deltas[0], CallStart) or deltas[0].text)):  # most tokens
        return list(deltas)
    whole: list[Delta] = []
    for _, group in groupby(deltas, key=_kind):
        first, *rest = group
        if isinstance(first, CallStart):
            whole.append(first)
        elif text := first.text + "".join(delta.text for delta in rest if not isinstance(delta, CallStart)):
            whole.append(replace(first, text=text))
    return whole


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    """A key that is equal for deltas that can be merged."""
    return type(delta), delta.call if isinstance(delta, (CallStart, CallArguments)) else -1
