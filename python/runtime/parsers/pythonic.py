"""Calls in Python syntax: `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping

from runtime.constrained.structural_tag import ConstString, Format, Tag
from runtime.parsers.argument_schema import ArgumentSchema, Schema
from runtime.parsers.call_grammar import CallGrammar, json_of, members, sequence
from runtime.parsers.calls import ArgumentWriter, ToolFormat, read_block
from runtime.parsers.reader import MAX_NAME, WHITE, Malformed, Reader, Steps

_CLOSING = {")": "(", "]": "[", "}": "{"}


class Pythonic(ToolFormat):
    """A list of calls whose arguments are keyword arguments with literal values."""

    begins = plain_begins = ("[",)
    tags = ()

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.expect("[")
        yield from read_block(reader, "]", lambda: _read_call(reader), separators=",")

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        tags = [Tag(f"{name}(", _arguments(schema), ")") for name, schema in ArgumentSchema.of_tools(tools).items()]
        return CallGrammar(tags, "[", "[", ", ", "]")


def _read_call(reader: Reader) -> Steps[bool]:
    name = yield from reader.take_name(_take_name(reader))
    if not (yield from reader.skip("(")):
        raise Malformed
    reader.start_call(name)
    arguments = ArgumentWriter(reader)
    while True:
        yield from reader.skip_all(WHITE + ",")
        if (yield from reader.skip(")")):
            break
        key = yield from reader.take_until("=", ")")
        if not (yield from reader.skip("=")):
            raise Malformed
        value = yield from _take_literal(reader)
        arguments.key(key.strip())
        reader.arguments(value)
    arguments.close()
    return True


def _take_name(reader: Reader) -> Steps[str]:
    """Read a function's name. Raises `Malformed` at the end of the text or beyond `MAX_NAME` characters."""
    name = ""
    while (letter := (yield from reader.peek())) and (letter.isalnum() or letter in "_.-"):
        name += letter
        reader.pos += 1
        if len(name) > MAX_NAME:
            raise Malformed
    if not letter:
        raise Malformed
    return name


def _take_literal(reader: Reader) -> Steps[str]:
    """Read a literal up to the comma or parenthesis after it, and return it as JSON."""
    taken, open_brackets, quote = "", "", ""
    while letter := (yield from reader.peek()):
        if quote:
            if letter == "\\":
                taken += letter
                reader.pos += 1
                letter = yield from reader.peek()
                if not letter:
                    break
            elif letter == quote:
                quote = ""
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            open_brackets += letter
        elif not open_brackets and letter in ",)":
            return _as_json(taken)
        elif letter in _CLOSING:
            if not open_brackets.endswith(_CLOSING[letter]):
                raise Malformed
            open_brackets = open_brackets[:-1]
        taken += letter
        reader.pos += 1
    raise Malformed


def _as_json(literal: str) -> str:
    """Convert a Python literal, or JSON, to JSON."""
    for read in (ast.literal_eval, json.loads):
        try:
            return json.dumps(read(literal.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    raise Malformed


def _arguments(schema: ArgumentSchema) -> Format:
    """Keyword arguments in the order of the schema, each followed by a comma; their values are JSON."""
    parts = members(schema.whole, lambda name, node: sequence(ConstString(f"{name}="), json_of(schema.standalone(node)), ConstString(", ")))
    return sequence(*(parts or [ConstString("")]))
