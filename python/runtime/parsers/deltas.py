"""The pieces that the output of a chat consists of."""

from __future__ import annotations

from collections.abc import Iterable
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
    """A tool call begins; `call` counts the calls of one answer from 0."""

    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of the arguments of a call that has begun."""

    call: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind as one, and without empty ones."""
    whole: list[Delta] = []
    for _, group in groupby(deltas, key=_kind):
        first, *rest = group
        if isinstance(first, CallStart):
            whole.append(first)
        elif text := first.text + "".join(delta.text for delta in rest if not isinstance(delta, CallStart)):
            whole.append(replace(first, text=text))
    return whole


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    """Equal for deltas that continue each other."""
    return type(delta), delta.call if isinstance(delta, (CallStart, CallArguments)) else -1
