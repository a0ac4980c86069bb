"""The interface of a tool-call format, and functions that formats share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from runtime.parsers.call_grammar import CallGrammar, Schema
from runtime.parsers.json_reader import escaped, read_value, take_string
from runtime.parsers.reader import WHITE, Malformed, Out, Reader, Steps

ARGUMENT_KEYS = ("arguments", "parameters")


class ToolFormat(ABC):
    """The form in which a family of models writes tool calls.

    Attributes:
        begins: tags that a call may begin with.
        plain_begins: those of `begins` that other text may also begin with.
        tags: all tags that may be control tokens; the text given to the parser must include them.
    """

    begins: tuple[str, ...]
    plain_begins: tuple[str, ...] = ()
    tags: tuple[str, ...]

    @abstractmethod
    def read(self, reader: Reader) -> Steps[None]:
        """Read the calls at the reader's position, which is at one of `begins`. Raises `Malformed` if the text violates the format."""

    def only_closes(self, text: str) -> bool:
        """Whether `text`, after the arguments of a call, is the end of the call or a part of it."""
        rest = text.lstrip(f'{WHITE}"}}])`')
        return any(tag.startswith(rest) for tag in (*self.begins, *self.tags))

    @abstractmethod
    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """The grammar of calls of these functions."""


def read_block(reader: Reader, end: str | None, call: Callable[[], Steps[bool]], separators: str = "") -> Steps[None]:
    """Read calls up to the tag `end`, which may be missing after the first call.

    Args:
        call: reads one call; returns False and reads nothing if there is none.
        separators: characters that may separate calls.
    """
    count = 0
    while True:
        yield from reader.skip_all(WHITE + separators * bool(count))
        ended = end is not None and (yield from reader.skip(end)) is not None
        if not ended and (yield from call()):
            count += 1
            reader.end_call()
            continue
        if not count:
            raise Malformed
        if not ended:
            reader.pos = reader.done  # text after the last call is not part of it
        return reader.end_call()


def read_json_call(reader: Reader, end: str | None = None) -> Steps[bool]:
    """Read `{"name": ..., "arguments": {...}}`, with its keys in any order.

    Args:
        end: the tag after the object; it also ends an object without its closing brace.
    """
    if not (yield from reader.skip("{")):
        return False
    name: str | None = None
    given: str | None = None  # arguments that precede the name
    begun = misnamed = False  # misnamed: whether there are members that may be misnamed arguments; after the call has begun, they are text
    while True:
        key = yield from take_string(reader)
        yield from reader.expect(":")
        if key == "name" and not begun:
            name = yield from reader.take_name(take_string(reader))
        elif key in ARGUMENT_KEYS and not begun and given is None:
            given = yield from _read_json_arguments(reader, name)
            begun = given is None
        else:
            further = key not in ("id", "type")
            misnamed |= further
            yield from read_value(reader, lambda _: None)
            if begun and further and not reader.unknown:
                reader.show_unread()
        yield from reader.skip_all(WHITE)
        if end is not None and (yield from reader.at(end)):
            break
        if (yield from reader.expect(",", "}")) == "}":
            break
    if not begun:
        if name is None or (given is None and misnamed):
            raise Malformed
        reader.start_call(name)
        reader.arguments(given or "{}")
        reader.end_arguments()
    return True


def _read_json_arguments(reader: Reader, name: str | None) -> Steps[str | None]:
    """Start the call and emit its arguments. If there is no name yet, or the arguments are not a plain object, return them instead."""
    yield from reader.skip_all(WHITE)
    letter = yield from reader.peek()
    if letter == "{" and name is not None:
        reader.start_call(name)
        yield from read_value(reader, reader.arguments)
        reader.end_arguments()
        return None
    kept: list[str] = []
    yield from read_value(reader, kept.append)
    text = "".join(kept)
    if letter == '"':  # an object inside a string
        text = json.loads(text)
    if text == "null":
        return "{}"
    if not _is_object(text):
        raise Malformed
    return text


def _is_object(text: str) -> bool:
    try:
        return json.dumps(json.loads(text), allow_nan=False).startswith("{")
    except (ValueError, RecursionError):
        return False


def read_named_call(reader: Reader, name: str, call_id: str = "") -> Steps[None]:
    """Read the arguments of a call whose name is known: one JSON object. For `call_id` see `Reader.start_call`."""
    yield from reader.skip_all(WHITE)
    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.start_call(name.strip(), call_id.strip())
    yield from read_value(reader, reader.arguments)
    reader.end_arguments()


def read_empty_call(reader: Reader, name: str, call_id: str) -> None:
    """Emit a call without arguments; see `read_named_call`."""
    reader.start_call(name.strip(), call_id.strip())
    reader.arguments("{}")
    reader.end_arguments()


def write_unended(reader: Reader, text: str) -> Steps[None]:
    """Emit `text`, the last that was read, as far as it is valid JSON. The model ended its answer within this value."""
    end = reader.pos
    reader.pos, reader.ran_out = end - len(text), False
    reader.accept()
    yield from read_value(reader, reader.arguments)
    reader.ran_out |= reader.pos == end


class ArgumentWriter:
    """Writes the arguments of a started call as a JSON object, member by member."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._count = 0

    def key(self, name: str) -> None:
        """Begin a member. Its value follows: JSON text for `Reader.arguments`, or `string`."""
        self.unended_key(name)
        self._reader.arguments('": ')
        self._count += 1

    def unended_key(self, name: str) -> None:
        """Begin a member whose name is incomplete, because the output ends within it."""
        self._reader.arguments(f'{", " if self._count else "{"}"{escaped(name.lstrip())}')

    def string(self, read: Callable[[Out], Steps[str | None]]) -> Steps[None]:
        """Write a string from the text that `read` passes on. Raises `Malformed` if the output ends within it."""
        self._reader.arguments('"')
        if (yield from read(lambda text: self._reader.arguments(escaped(text)))) is None:
            raise Malformed
        self._reader.arguments('"')

    def close(self) -> None:
        """End the object."""
        self._reader.arguments("}" if self._count else "{}")
