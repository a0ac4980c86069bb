"""The harmony format of gpt-oss, parsed from token ids. Messages have a channel; a call is a message to a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from runtime.constrained.structural_tag import Format, Tag
from runtime.parsers.call_grammar import CallGrammar, Schema, json_of, object_schema
from runtime.parsers.calls import read_named_call
from runtime.parsers.deltas import Delta
from runtime.parsers.reader import WHITE, Malformed, Reader, Steps
from runtime.text.decode_stream import StreamDecoder
from runtime.text.stop_finder import StopFinder

MAX_HEADER = 64
"""Most tokens of a header; a longer sequence is not a header."""
ROLE = "assistant"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")
_RECIPIENT = re.compile(r"to=[^\s<]+")
_CHANNEL_NAMES = "|".join(name[:end] for name in ("analysis", "commentary", "final") for end in range(len(name), -1, -1))
_TYPE = r"<\|constrain\|> ?\w*"
_CUT_HEADER = re.compile(rf"(assistant)? ?(to=\S*)? ?(<\|channel\|> ?({_CHANNEL_NAMES})( to=\S*| to?)?( ?{_TYPE}| json| code)?|{_TYPE})?")
"""A header that may be incomplete, with single spaces."""
Kind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True)
class HarmonyTokens:
    """The ids of the format's control tokens."""

    start: int
    channel: int
    message: int
    constrain: int
    end: int
    call: int
    # The token is spelled <|return|>.
    return_: int

    @classmethod
    def find(cls, token_id: Callable[[str], int | None]) -> HarmonyTokens | None:
        """The ids in a vocabulary, or None if it lacks one."""
        ids = {field.name: token_id(f"<|{field.name.rstrip('_')}|>") for field in fields(cls)}
        return None if None in ids.values() else cls(**ids)  # pyright: ignore[reportArgumentType]

    @property
    def spelled(self) -> dict[int, str]:
        """The text of each id."""
        return {getattr(self, field.name): f"<|{field.name.rstrip('_')}|>" for field in fields(self)}

    @property
    def header_begins(self) -> tuple[int, ...]:
        """The tokens after which there is no text up to the next `message`."""
        return (self.start, self.channel, self.end)

    @property
    def stops(self) -> tuple[int, int]:
        """The tokens that end an answer."""
        return (self.return_, self.call)


THINKING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""The texts before and after the thinking of an answer."""


def call_grammar(tools: Mapping[str, Schema]) -> CallGrammar:
    """The grammar of calls. A call ends the answer."""
    begin = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    tags = [Tag(begin.format(name), json_of(object_schema(schema)), "") for name, schema in tools.items()]
    return CallGrammar(tags, "<|channel|>commentary to=functions.", single=True)


def text_part(part: Format) -> Format:
    """Text in the user's channel, `final`."""
    return Tag("<|channel|>final<|message|>", part, "")


class HarmonyParser:
    """Reads one answer in harmony format; has the methods of `TextParser`.

    Args:
        tokens: the control tokens.
        decoder: creates the decoder of one message.
        tools: the JSON schema of each function's parameters.
        prompt_ids: the prompt; the output continues its last message.
        new_id: creates the id of a call.
        stops: strings that end the answer; no part of one is emitted.
        separate: whether thinking is emitted as reasoning; otherwise it stays in the content.
    """

    def __init__(
        self,
        tokens: HarmonyTokens,
        decoder: Callable[[], StreamDecoder],
        tools: Mapping[str, Mapping[str, Any]],
        prompt_ids: Sequence[int],
        new_id: Callable[[], str],
        stops: tuple[str, ...] = (),
        separate: bool = True,
    ) -> None:
        self._tokens, self._spelled = tokens, tokens.spelled
        self._new_decoder, self._stops, self._separate = decoder, StopFinder(stops), separate
        self._reader = Reader(tools, new_id)
        self._header: list[int] | None = []  # None inside a message
        self._kind: Kind = "content"
        self._decoder = decoder()
        self._call: Steps[None] | None = None
        self._finished = False
        self.reasoning_tokens = 0
        self._seen: set[Kind] = set()  # kinds that were emitted; the next message of such a kind starts on a new line
        last = max((place for place, token in enumerate(prompt_ids) if token == tokens.start), default=len(prompt_ids) - 1)
        self.feed("", prompt_ids[last + 1 :])
        self.reasoning_tokens, self._seen = 0, set()
        if self._header is not None and self._plain(self._header) == ROLE:
            self._header = []

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """See `TextParser`; the text is not used."""
        for token in token_ids:
            self._take(token)
        return self._reader.take_deltas()

    def finish(self, cut_off: bool = False) -> list[Delta]:
        """See `TextParser`."""
        self._finished, self._reader.cut_off = True, cut_off
        self._end()
        return self._reader.take_deltas()

    # ---- messages

    def _take(self, token: int) -> None:
        tokens = self._tokens
        if self._header is None:
            self.reasoning_tokens += self._kind == "reasoning"
            if token in (*tokens.header_begins, *tokens.stops):
                self._close()
                self._header = [token] if token == tokens.channel else []
            elif token not in self._spelled:
                self._show(self._decoder.step((token,)))
        elif token == tokens.message:
            self._read_header(self._plain(self._header))
        elif token in (tokens.start, tokens.end, *tokens.stops):
            self._end()
            self._header = []
        else:
            self._header.append(token)
            if len(self._header) > MAX_HEADER:
                self._show_plain(self._header)

    def _end(self) -> None:
        """End the message or the header. A header with more than role, recipient, channel and type is text."""
        if self._header is not None and not _CUT_HEADER.fullmatch(" ".join(self._plain(self._header).split())):
            self._show_plain(self._header)
        if self._header is None:
            self._close()

    def _show_plain(self, header: Sequence[int]) -> None:
        """Emit what was read as a header as content."""
        self._open("content")
        self._show(self._plain(header))

    def _read_header(self, header: str) -> None:
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        if function is None and _RECIPIENT.search(header) is None:
            self._open("reasoning" if channel is not None and channel[1] == "analysis" else "content")
            return
        self._open("call")
        # If the call is malformed, its header is emitted with it.
        self._reader.add(f"{header.removeprefix(ROLE)}{self._spelled[self._tokens.message]}")
        self._reader.pos = len(self._reader.text)
        self._call = self._read_call(function[1] if function is not None else "")
        next(self._call, None)

    def _open(self, kind: Kind) -> None:
        self._header, self._kind, self._decoder = None, kind, self._new_decoder()
        if self._shown in self._seen and kind != "call":
            self._emit("\n")

    def _close(self) -> None:
        self._emit(self._stops.flush() if self._stops.matched is None else "")
        if self._call is not None:
            self._reader.ended = True
            next(self._call, None)
            self._reader.ended, self._call = False, None

    def _show(self, text: str) -> None:
        if self._stops.matched is None:
            self._emit(self._stops.push(text))

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._seen.add(self._shown)
        if self._call is not None:
            self._reader.add(text)
            next(self._call, None)
        elif self._shown == "reasoning":
            self._reader.reasoning(text)
        else:
            self._reader.content(text)

    def _read_call(self, name: str) -> Steps[None]:
        """Read the message of a call; if it is not a JSON object, emit it as content. The rest of a call that was cut off is dropped."""
        reader = self._reader
        reader.begin_calls(reader.content)
        before = reader.calls
        try:
            if name not in reader.tools:
                raise Malformed
            yield from read_named_call(reader, name)
        except Malformed:
            begun = reader.calls > before or (reader.cut_off and name in reader.tools)
            if self._finished and reader.ran_out and begun:
                return reader.drop_rest()
            reader.emit_as_content()
        else:
            yield from reader.skip_all(WHITE)
            reader.accept()
        yield from reader.read_until((), reader.content)

    @property
    def _shown(self) -> Kind:
        """The kind of delta that the message is emitted as."""
        return "content" if self._kind == "reasoning" and not self._separate else self._kind

    def _plain(self, ids: Sequence[int]) -> str:
        """The text of a header, including its control tokens."""
        decoder = self._new_decoder()
        return "".join(self._spelled.get(token) or decoder.step((token,)) for token in ids)
