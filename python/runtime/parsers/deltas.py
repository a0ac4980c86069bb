"""The pieces that the output of a chat consists of."""

from __future__ import annotations

from dataclasses import dataclass


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
