"""Calls written in Python: `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass

from runtime.parsers.calls import ArgumentWriter, read_block
from runtime.parsers.reader import MAX_NAME, WHITE, Malformed, Reader, Steps

_CLOSING = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class Pythonic:
    """A list of calls with keyword arguments, which are literals."""

    begins: tuple[str, ...] = ("[",)
    tags: tuple[str, ...] = ()

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.expect("[")
        yield from read_block(reader, "]", lambda: _read_call(reader), separators=",")


def _read_call(reader: Reader) -> Steps[bool]:
    name = ""
    while (letter := (yield from reader.peek())) and (letter.isalnum() or letter in "_.-"):
        name += letter
        reader.pos += 1
        if len(name) > MAX_NAME:
            raise Malformed
    if not (yield from reader.skip("(")):
        raise Malformed
    reader.start_call(name)
    arguments = ArgumentWriter(reader)
    while True:
        yield from reader.skip_all(WHITE + ",")
        if (yield from reader.skip(")")):
            break
        key = yield from reader.take_until("=")
        yield from reader.skip("=")
        value = yield from _take_literal(reader)
        arguments.key(key.strip())
        arguments.value(value)
    arguments.close()
    return True


def _take_literal(reader: Reader) -> Steps[str]:
    """The literal up to the comma or the parenthesis behind it, as JSON."""
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
    names = {"true": "True", "false": "False", "null": "None"}
    text = literal.strip()
    try:
        return json.dumps(ast.literal_eval(names.get(text, text)), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed from error
