"""Converts the engine's updates of one answer into chat updates."""

from __future__ import annotations

import msgspec

from runtime.entrypoints.openai.chat_updates import ChatFinish, ChatUpdate
from runtime.managers.messages import TextOut
from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning, joined
from runtime.parsers.output_parser import OutputParser


class AnswerReader:
    """Reads one answer.

    Args:
        parser: reads the output; None for plain text.
        parallel: whether to return more than one call.
        stream_reasoning: whether to return thinking as it is generated, not in one piece.
    """

    def __init__(self, parser: OutputParser | None, parallel: bool = True, stream_reasoning: bool = True) -> None:
        self._parser = parser
        self._parallel, self._stream_reasoning = parallel, stream_reasoning
        self._held: list[Delta] = []
        self._arguments: list[str] | None = None  # of the latest call

    @property
    def reasoning_tokens(self) -> int:
        """Number of thinking tokens so far."""
        return 0 if self._parser is None else self._parser.reasoning_tokens

    def read(self, update: TextOut) -> ChatUpdate:
        """Convert the next update."""
        finish = update.finish and ChatFinish(update.finish.reason, update.finish.matched)
        if self._parser is None:
            deltas: list[Delta] = [Content(update.text)] if update.text else []
            return ChatUpdate(update.index, deltas, update.token_ids, update.logprobs, finish)
        stop_token = finish is not None and isinstance(finish.matched, int)  # has no text, but is among the tokens
        deltas = self._parser.feed(update.text, update.token_ids[:-1] if stop_token else update.token_ids)
        if finish is not None:
            deltas += self._parser.finish(cut_off=finish.reason != "stop" or isinstance(finish.matched, str))
        deltas = self._wanted(deltas, last=finish is not None)
        if finish is not None and finish.reason == "stop" and self._has_calls(finish):
            finish = ChatFinish("tool_calls", finish.matched)
        return ChatUpdate(update.index, deltas, update.token_ids, update.logprobs, finish)

    def _has_calls(self, finish: ChatFinish) -> bool:
        """Whether the answer has calls that no stop string cut off."""
        if self._arguments is None or not isinstance(finish.matched, str):
            return self._arguments is not None
        try:
            msgspec.json.decode("".join(self._arguments), type=msgspec.Raw)
        except msgspec.DecodeError:
            return False
        return True

    def _wanted(self, deltas: list[Delta], last: bool) -> list[Delta]:
        """The deltas that the request asked for."""
        if not self._parallel:
            deltas = [delta for delta in deltas if not (isinstance(delta, (CallStart, CallArguments)) and delta.call > 0)]
        for delta in deltas:
            if isinstance(delta, CallStart):
                self._arguments = []
            elif isinstance(delta, CallArguments) and self._arguments is not None:
                self._arguments.append(delta.text)
        if self._stream_reasoning:
            return joined(deltas) if len(deltas) > 1 else deltas
        self._held += deltas
        if not last and all(isinstance(delta, Reasoning) for delta in self._held):
            return []
        deltas, self._held = self._held, []
        return joined(deltas)
