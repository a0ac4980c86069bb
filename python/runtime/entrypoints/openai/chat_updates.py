"""The updates of an answer, independent of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from runtime.managers.messages import TokenLogprobs
from runtime.parsers.deltas import Delta

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
