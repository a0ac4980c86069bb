"""Gemma 4: `<|tool_call>call:f{key:<|"|>text<|"|>,n:1}<tool_call|>`."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.parsers.argument_types import typed_json
from runtime.parsers.calls import ArgumentWriter
from runtime.parsers.json_reader import MAX_DEPTH, escaped
from runtime.parsers.reader import WHITE, Malformed, Reader, Steps

QUOTE = '<|"|>'
_BARE_TYPES = frozenset({"integer", "number", "boolean", "null", "string"})


@dataclass(frozen=True)
class Gemma4:
    """Objects with unquoted keys, and strings between `<|"|>` without escapes."""

    begins: tuple[str, ...] = ("<|tool_call>",)
    tags: tuple[str, ...] = ("<|tool_call>", "<tool_call|>", QUOTE)

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.expect("<|tool_call>")
        yield from reader.expect("call:")
        name = yield from reader.take_until("{")
        reader.start_call(name.strip())
        yield from _read_value(reader, 0)
        yield from reader.skip_all(WHITE)
        yield from reader.skip("<tool_call|>")
        reader.accept()


def _read_value(reader: Reader, depth: int) -> Steps[None]:
    """Deliver one value as JSON."""
    if depth > MAX_DEPTH:
        raise Malformed
    yield from reader.skip_all(WHITE)
    opening = yield from reader.skip("{", "[", QUOTE)
    if opening == "{":
        yield from _read_object(reader, depth)
    elif opening == "[":
        yield from _read_array(reader, depth)
    elif opening == QUOTE:
        yield from _read_text(reader)
    else:
        bare = (yield from reader.take_until(",", "}", "]", "\n")).strip()
        if not bare:
            raise Malformed
        reader.arguments(typed_json(bare, _BARE_TYPES))


def _read_object(reader: Reader, depth: int) -> Steps[None]:
    members = ArgumentWriter(reader)
    while True:
        yield from reader.skip_all(WHITE + ",")
        if (yield from reader.skip("}")):
            return members.close()
        quoted = yield from reader.skip(QUOTE)
        key = yield from reader.take_until(QUOTE if quoted else ":")
        yield from reader.skip(QUOTE)
        yield from reader.expect(":")
        members.key(key.strip())
        yield from _read_value(reader, depth + 1)


def _read_array(reader: Reader, depth: int) -> Steps[None]:
    reader.arguments("[")
    first = True
    while True:
        yield from reader.skip_all(WHITE + ",")
        if (yield from reader.skip("]")):
            return reader.arguments("]")
        if not first:
            reader.arguments(", ")
        first = False
        yield from _read_value(reader, depth + 1)


def _read_text(reader: Reader) -> Steps[None]:
    reader.arguments('"')
    if (yield from reader.read_until((QUOTE,), lambda text: reader.arguments(escaped(text)))) is None:
        raise Malformed
    yield from reader.skip(QUOTE)
    reader.arguments('"')
