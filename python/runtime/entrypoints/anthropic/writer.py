"""Converts chat updates into the blocks and events of one message."""

from __future__ import annotations

import json
from typing import Any

import orjson

from runtime.entrypoints.http.responses import anthropic_error
from runtime.entrypoints.openai.chat_updates import ChatFinish, ChatUpdate
from runtime.entrypoints.openai.usage import TokenCounts
from runtime.errors import ServingError
from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

Json = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Builds one message. Each method returns the events that describe its changes."""

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        self.message: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt_tokens, 0, 0),
        }
        self._blocks: list[Json] = self.message["content"]
        self._open: Json | None = None
        self._arguments = ""
        self._finish: ChatFinish | None = None

    def start(self) -> list[Json]:
        """The first events."""
        return [{"type": "message_start", "message": {**self.message, "content": []}}, {"type": "ping"}]

    def update(self, update: ChatUpdate) -> list[Json]:
        """Add the deltas of an update."""
        self._finish = update.finish or self._finish
        return [event for delta in update.deltas for event in self._add(delta)]

    def end(self, counts: TokenCounts) -> list[Json]:
        """Complete the message."""
        events, finish = self._close(), self._finish
        stop: Json = {"stop_reason": None, "stop_sequence": None}
        if finish is not None:
            stop["stop_reason"] = STOP_REASONS.get(finish.reason)
            if finish.reason == "stop" and isinstance(finish.matched, str):
                stop = {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        self.message |= {**stop, "usage": _usage(counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)}
        return [*events, {"type": "message_delta", "delta": stop, "usage": self.message["usage"]}, {"type": "message_stop"}]

    def fail(self, error: ServingError) -> list[Json]:
        """End with an error."""
        return [anthropic_error(error)]

    # ---- blocks

    def _add(self, delta: Delta) -> list[Json]:
        match delta:
            case Content(text):
                return self._grow("text", text)
            case Reasoning(text):
                return self._grow("thinking", text)
            case CallStart(_, call_id, name):
                return [*self._close(), self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})]
            case CallArguments(_, text):
                self._arguments += text
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def _grow(self, kind: str, text: str) -> list[Json]:
        """Add text to the open block if it is of this kind, else to a new block."""
        events: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = [*self._close(), self._begin({"type": kind, kind: "", **signature})]
        assert self._open is not None
        self._open[kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: Json) -> Json:
        self._open = block
        self._blocks.append(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        """End the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        if block["type"] == "tool_use":
            block["input"], self._arguments = _parsed(self._arguments), ""
        events = [self._delta({"type": "signature_delta", "signature": ""})] if block["type"] == "thinking" else []
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _parsed(arguments: str) -> Any:
    """The arguments of a call as unparsed JSON, because their numbers may exceed what the encoder supports.

    Truncated arguments count as empty.
    """
    try:
        return orjson.Fragment(arguments) if isinstance(json.loads(arguments), dict) else {}
    except ValueError:
        return {}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
