"""Calls in Python syntax: `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping

from runtime.constrained.structural_tag import ConstString, Format, Tag
from runtime.parsers.argument_schema import ArgumentSchema, Schema
from runtime.parsers.call_grammar import CallGrammar, json_of, members, sequence
from runtime.parsers.calls import ArgumentWriter, ToolFormat, read_block
from runtime.parsers.reader import MAX_NAME, WHITE, Malformed, Reader, Steps

_CLOSING = {")": "(", "]": "[", "}": "{"}
_OPENING = {opening: closing for closing, opening in _CLOSING.items()}
_KEY_STOPS = ("=", "(", ")", "[", "]", "{", "}", ",", "'", '"')
_PREFIXES = "bBrRuU"
_MAX_DROPPED = 16
_UNQUOTED = re.compile(r"[A-Za-z0-9_.+:\s-]")
"""A character of a literal outside of strings, besides brackets and commas."""


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
        key = yield from reader.take_until(*_KEY_STOPS, unended=arguments.unended_key)
        if not (yield from reader.skip("=")):
            raise Malformed
        arguments.key(key.strip())
        reader.arguments((yield from _take_literal(reader)))
    arguments.close()
    reader.end_arguments()
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
    """Read a literal up to the comma or parenthesis after it, and return it as JSON. Raises `Malformed` where it cannot be a literal."""
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
            if taken.rstrip(_PREFIXES)[-1:].isalnum():
                raise Malformed
            quote = letter
        elif letter in "([{":
            open_brackets += letter
        elif not open_brackets and letter in ",)":
            return _as_json(taken)
        elif letter in _CLOSING:
            if not open_brackets.endswith(_CLOSING[letter]):
                raise Malformed
            open_brackets = open_brackets[:-1]
        elif letter != "," and (not _UNQUOTED.match(letter) or (taken.endswith(("'", '"')) and letter.isalnum())):
            raise Malformed
        taken += letter
        reader.pos += 1
    if not reader.cut_off and (begun := _unended(taken, quote, open_brackets)):
        reader.arguments(begun)
    elif not reader.cut_off and len(taken) >= len("True"):
        reader.ran_out = False  # it is not the beginning of a literal, but text
    raise Malformed


def _unended(taken: str, quote: str, open_brackets: str) -> str:
    """JSON of the beginning of a literal, without a few last characters if they are not complete.

    Args:
        quote: that of the string which is open at the end of `taken`, or "".
        open_brackets: those that are open at the end of `taken`.
    """
    ends = "".join(_OPENING[bracket] for bracket in reversed(open_brackets))
    for end in range(len(taken), max(len(taken) - _MAX_DROPPED, 0), -1):
        for more in ("", ": 0"):  # the latter if the string is a key
            try:
                return _as_json(taken[:end] + quote + more + ends)[: -len(quote + more + ends) or None]
            except Malformed:
                continue
    return ""


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
