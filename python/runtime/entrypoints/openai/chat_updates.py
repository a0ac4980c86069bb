"""The updates of an answer, independent of the protocol, and the complete answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from runtime.managers.messages import TokenLogprobs
from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChatFinish:
    """Why an answer ended; `matched` is the stop token id or the stop string."""

    reason: ChatFinishReason
    matched: int | str | None = None


class ChatUpdate(msgspec.Struct, frozen=True):
    """One step of one answer.

    Attributes:
        index: the answer, 0..n - 1.
        deltas: its new deltas in order; may be empty.
        token_ids: new tokens, including a stop token that ended the answer.
        logprobs: those of `token_ids`, if requested.
        finish: why the answer ended; set in exactly one update of each answer.
    """

    index: int
    deltas: Sequence[Delta]
    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    finish: ChatFinish | None = None


@dataclass(slots=True)
class ToolCall:
    """One complete tool call; `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """One answer so far, accumulated from its updates."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    finish: ChatFinish | None = None

    def add(self, update: ChatUpdate) -> None:
        """Append an update."""
        for delta in update.deltas:
            match delta:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case CallArguments(call, text):
                    self.calls[call].arguments += text
        self.token_ids.extend(update.token_ids)
        if update.logprobs is not None:
            self.logprobs.extend(update.logprobs)
        self.finish = update.finish or self.finish
