"""Converts chat updates into the items and events of one response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import orjson

from runtime.entrypoints.openai.chat_updates import ChatFinish, ChatUpdate
from runtime.entrypoints.openai.usage import TokenCounts
from runtime.errors import ServingError
from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

Json = dict[str, Any]
Logprobs = Callable[[ChatUpdate], list[Json]]

ITEM_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
PART = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """Builds one response object. Each method returns the events that describe its changes.

    Args:
        response: the response object without output.
        logprobs: returns the log-probabilities of an update in OpenAI's form; empty if not requested.
        names: name and namespace of each function in a namespace, by its name in the prompt.
    """

    def __init__(self, response: Json, logprobs: Logprobs, names: Mapping[str, Json] = MappingProxyType({})) -> None:
        self.response = response
        self._output: list[Json] = response["output"]
        self._logprobs = logprobs
        self._names = names
        self._open: Json | None = None
        self._unshown: list[Json] = []  # log-probabilities of tokens whose text is held back
        self._sequence = 0
        self._finish: ChatFinish | None = None

    def start(self) -> list[Json]:
        """The first events."""
        return [self._state("response.created"), self._state("response.in_progress")]

    def update(self, update: ChatUpdate) -> list[Json]:
        """Add the deltas of an update."""
        self._finish = update.finish or self._finish
        self._unshown += self._logprobs(update)
        events = [event for delta in update.deltas for event in self._add(delta)]
        if self._open is not None and self._open["type"] != "message":
            self._unshown = []  # they belong to thinking or a call
        return events

    def end(self, counts: TokenCounts) -> list[Json]:
        """Complete the response."""
        reason = self._finish.reason if self._finish is not None else "abort"
        complete = reason in ("stop", "tool_calls")
        opened = [] if self._output else self._need("message")  # an empty answer also has a message
        if self._open is not None and self._open["type"] == "message":
            self._part("message")["logprobs"] += self._unshown  # those of the tokens that ended the text
        events = opened + self._close("completed" if complete else "incomplete")
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
        self.response["status"], self.response["usage"] = status, usage(counts)
        if complete:
            self.response["completed_at"] = int(time.time())
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._state("response.completed" if complete else "response.incomplete")]

    def fail(self, error: ServingError) -> list[Json]:
        """End with an error."""
        events = self._close("incomplete")
        self.response["status"], self.response["error"] = "failed", {"code": "server_error", "message": str(error)}
        told = self._event("error", code=error.code, message=str(error), param=error.param)
        return [*events, told, self._state("response.failed")]

    # ---- items

    def _add(self, delta: Delta) -> list[Json]:
        match delta:
            case Content(text):
                opened, logprobs, self._unshown = self._need("message"), self._unshown, []
                part = self._part("message")
                part["text"] += text
                part["logprobs"].extend(logprobs)
                return [*opened, self._at("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]
            case Reasoning(text):
                opened = self._need("reasoning")
                self._part("reasoning")["text"] += text
                return [*opened, self._at("response.reasoning_text.delta", content_index=0, delta=text)]
            case CallStart(_, call_id, name):
                named = self._names.get(name, {"name": name})
                return [*self._close("completed"), *self._begin("function_call", call_id=call_id, **named, arguments="")]
            case CallArguments(_, text):
                item = self._current()
                item["arguments"] += text
                return [self._at("response.function_call_arguments.delta", delta=text)]

    def _need(self, kind: str) -> list[Json]:
        """Open an item of `kind`, with one empty part, unless it is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        events = [*self._close("completed"), *self._begin(kind, content=[], **own)]
        part: Json = {"type": PART[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        self._current()["content"].append(part)
        return [*events, self._at("response.content_part.added", content_index=0, part=_copy(part))]

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        self._open = {"id": f"{ITEM_PREFIX[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._output.append(self._open)
        return [self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(self._open))]

    def _close(self, status: str) -> list[Json]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        if item["type"] == "function_call":
            events = [self._at("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        else:
            part = self._part(item["type"])
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events = [
                self._at(f"response.{part['type']}.done", content_index=0, text=part["text"], **more),
                self._at("response.content_part.done", content_index=0, part=_copy(part)),
            ]
        item["status"], self._open = status, None
        return [*events, self._event("response.output_item.done", output_index=len(self._output) - 1, item=_copy(item))]

    def _part(self, kind: str) -> Json:
        """The only part of the open item."""
        assert self._current()["type"] == kind
        return self._current()["content"][0]

    def _current(self) -> Json:
        assert self._open is not None, "a delta without an item"
        return self._open

    # ---- events

    def _state(self, kind: str) -> Json:
        """An event with the response so far."""
        return self._event(kind, response={**self.response, "output": [_copy(item) for item in self._output]})

    def _at(self, kind: str, **fields: Any) -> Json:
        """An event about the open item, which is the last one."""
        return self._event(kind, item_id=self._current()["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def usage(counts: TokenCounts) -> Json:
    """Token counts in the form of /v1/responses."""
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens or 0},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def _copy(value: Any) -> Any:
    """A deep copy of a JSON value."""
    return orjson.loads(orjson.dumps(value))
