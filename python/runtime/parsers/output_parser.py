"""Parses the output of one answer into typed deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from runtime.parsers.calls import ToolFormat
from runtime.parsers.deltas import Delta
from runtime.parsers.harmony import HarmonyParser
from runtime.parsers.reader import WHITE, Malformed, Out, Reader, Steps
from runtime.parsers.thinking import Opening, ThinkFormat


class TextParser:
    """Reads thinking and tool calls in text. The result does not depend on how the output is split into pieces.

    Args:
        thinking: the model's thinking format, or None.
        calls: the model's tool format, or None if there are no tools.
        tools: the JSON schema of each function's parameters.
        opening: whether the prompt ends inside thinking.
        new_id: creates the id of a call.
        token_bytes: the length of a token in the text, in bytes.
    """

    def __init__(
        self,
        thinking: ThinkFormat | None,
        calls: ToolFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        opening: Opening,
        new_id: Callable[[], str],
        token_bytes: Callable[[int], int],
    ) -> None:
        self._thinking = thinking if thinking is None or calls is not None else replace(thinking, ended_by=())
        self._calls = calls
        self._reader = Reader(tools, new_id)
        self._token_bytes = token_bytes
        self._ids: list[int] = []
        self._text: list[str] = []
        self._counted: tuple[int | None, int] = (None, 0)
        self._steps = self._read(opening)
        next(self._steps, None)

    @property
    def reasoning_tokens(self) -> int:
        """Number of thinking tokens so far, including tags."""
        thoughts = self._reader.thoughts
        if not thoughts:
            return 0
        if thoughts == [(0, None)]:
            return len(self._ids)
        end = thoughts[-1][1]
        if end is None or end != self._counted[0]:
            self._counted = (end, self._count(thoughts))
        return self._counted[1]

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """Take the next tokens and their text."""
        if self._thinking is not None:
            self._text.append(text)
            self._ids.extend(token_ids)
        self._reader.add(text)
        next(self._steps, None)
        return self._reader.take_deltas()

    def finish(self, cut_off: bool = False) -> list[Delta]:
        """End the output and return the deltas that were held back.

        Args:
            cut_off: whether a limit or a stop string ended the output, not the model.
        """
        self._reader.ended, self._reader.cut_off = True, cut_off
        next(self._steps, None)
        return self._reader.take_deltas()

    def _read(self, opening: Opening) -> Steps[None]:
        reader, thinking, calls = self._reader, self._thinking, self._calls
        if thinking is not None:
            yield from self._read_thinking(thinking, thinking.read_first(reader, opening))
        later = (thinking.begin,) if thinking is not None and thinking.anywhere else ()
        tags = (*later, *(calls.begins if calls is not None else ()))
        while tag := (yield from reader.read_until(tags, self._content, WHITE if tags else "")):
            if thinking is not None and tag in later:
                yield from reader.skip(tag)
                yield from self._read_thinking(thinking, thinking.read(reader))
            elif calls is not None:
                yield from self._read_calls(calls, tag, reader.content)
        plain = calls.plain_begins if calls is not None else ()
        reader.read_partial([tag for tag in tags if tag not in plain], self._content)

    def _read_thinking(self, thinking: ThinkFormat, reading: Steps[str | None]) -> Steps[None]:
        """Read thinking and the calls that end it; text that only looks like a call does not end it."""
        before = self._reader.calls
        while (tag := (yield from reading)) in thinking.ended_by and tag and self._calls is not None:
            yield from self._read_calls(self._calls, tag, thinking.out(self._reader))
            if self._reader.calls > before:
                return
            self._reader.resume_thought()
            reading = thinking.read_rest(self._reader)

    def _read_calls(self, calls: ToolFormat, tag: str, out: Out) -> Steps[None]:
        """Read calls that begin with `tag`. Text that only looks like a call is passed to `out`; after the start of a call it is content.

        The rest of a call that was cut off is dropped, and so are parts of the tags that end a call.
        """
        reader = self._reader
        start, before = reader.base + reader.pos, reader.calls
        reader.begin_calls(out)
        try:
            yield from calls.read(reader)
        except Malformed:
            started, marked = reader.calls > before, tag not in calls.plain_begins
            begun = reader.in_call or (reader.cut_off and reader.may_call(marked or started))
            if reader.ran_out and (begun or (started and calls.only_closes(reader.text[reader.done :]))):
                return reader.drop_rest()
            if not started:  # the text after a tag may contain the end of the thinking, or a call
                first = start - reader.base
                reader.pos = max(reader.done, first + len(tag)) if marked else max(reader.pos, first + 1)
            reader.show_unread()
        else:
            if reader.ran_out and reader.unknown:
                reader.pos = len(reader.text)
                reader.show_unread()
            elif reader.ran_out:
                reader.drop_rest()

    def _content(self, text: str) -> None:
        if self._reader.ended and self._reader.calls and text.isspace():
            self._reader.accept()  # the line break after the last call
        else:
            self._reader.content(text)

    def _count(self, thoughts: Sequence[tuple[int, int | None]]) -> int:
        """Number of tokens that begin inside `thoughts`."""
        text = "".join(self._text)
        places = [(len(text[:begin].encode()), len(text[:end].encode())) for begin, end in thoughts]
        starts = accumulate((self._token_bytes(token) for token in self._ids), initial=0)
        return sum(any(begin <= start < end for begin, end in places) for start, _ in zip(starts, self._ids, strict=False))


OutputParser = TextParser | HarmonyParser
"""The parser of one answer."""
