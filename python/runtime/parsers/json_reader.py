"""Reads JSON in the model's output and passes it on as it arrives, as long as it is valid."""

from __future__ import annotations

import json
import re

from runtime.parsers.reader import WHITE, Malformed, Out, Reader, Steps
from runtime.text.characters import REPLACEMENT

MAX_DEPTH = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_HEX = frozenset("0123456789abcdefABCDEF")
_HIGH, _LOW = re.compile(r"\\u[dD][89abAB].."), re.compile(r"\\u[dD][c-fC-F]..")


def read_value(reader: Reader, out: Out, depth: int = 0) -> Steps[None]:
    """Pass one JSON value to `out`. Raises `Malformed` at the first character that is not valid JSON."""
    yield from _read_space(reader, out)
    letter = yield from reader.peek()
    if letter == '"':
        yield from read_string(reader, out)
    elif letter in ("{", "["):
        yield from _read_container(reader, out, depth)
    else:
        word = yield from reader.skip_all(_WORD)
        if word not in ("true", "false", "null") and not _NUMBER.fullmatch(word):
            if reader.ran_out and not reader.cut_off:
                out(word)  # the model ended its answer here
            raise Malformed
        out(word)


def read_string(reader: Reader, out: Out) -> Steps[None]:
    """Pass one JSON string to `out`; unescaped line breaks and tabs are escaped."""
    _take(reader, out, 1)
    while letter := (yield from reader.peek()):
        if plain := _PLAIN.match(reader.text, reader.pos):
            _take(reader, out, len(plain[0]))
        elif letter == '"':
            return _take(reader, out, 1)
        elif letter == "\\":
            yield from _read_escape(reader, out)
        else:
            reader.pos += 1
            out(escaped(letter))
    raise Malformed


def take_string(reader: Reader) -> Steps[str]:
    """Read one JSON string and return its text. Raises `Malformed` for anything else."""
    yield from reader.skip_all(WHITE)
    if (yield from reader.peek()) != '"':
        raise Malformed
    kept: list[str] = []
    yield from read_string(reader, kept.append)
    return json.loads("".join(kept))


def escaped(text: str) -> str:
    """`text` escaped for a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_container(reader: Reader, out: Out, depth: int) -> Steps[None]:
    """Read an object or an array; the reader is at its opening bracket."""
    if depth == MAX_DEPTH:
        raise Malformed
    close = "}" if reader.text[reader.pos] == "{" else "]"
    _take(reader, out, 1)
    yield from _read_space(reader, out)
    if (yield from reader.peek()) == close:
        return _take(reader, out, 1)
    while True:
        if close == "}":
            yield from _read_key(reader, out)
        yield from read_value(reader, out, depth + 1)
        yield from _read_space(reader, out)
        letter = yield from reader.peek()
        if letter not in (",", close) or not letter:
            raise Malformed
        _take(reader, out, 1)
        if letter == close:
            return None


def _read_key(reader: Reader, out: Out) -> Steps[None]:
    yield from _read_space(reader, out)
    if (yield from reader.peek()) != '"':
        raise Malformed
    yield from read_string(reader, out)
    yield from _read_space(reader, out)
    if (yield from reader.peek()) != ":":
        raise Malformed
    _take(reader, out, 1)


def _read_escape(reader: Reader, out: Out) -> Steps[None]:
    """Read an escape sequence and pass it on as a whole; the reader is at its backslash. A lone surrogate becomes U+FFFD."""
    escape = yield from _take_escape(reader)
    while _HIGH.fullmatch(escape) and (yield from reader.at("\\u")):
        second = yield from _take_escape(reader)
        if _LOW.fullmatch(second):
            return out(escape + second)
        out(REPLACEMENT)
        escape = second
    if reader.ran_out:  # the other half may have followed
        raise Malformed
    out(REPLACEMENT if _HIGH.fullmatch(escape) or _LOW.fullmatch(escape) else escape)


def _take_escape(reader: Reader) -> Steps[str]:
    found, wanted = "", 2
    while len(found) < wanted:
        letter = yield from reader.peek()
        valid = letter in (_HEX if len(found) > 1 else '"\\/bfnrtu' if found else "\\")
        if not letter or not valid:
            raise Malformed
        found += letter
        reader.pos += 1
        wanted = 6 if found == "\\u" else wanted
    return found


def _read_space(reader: Reader, out: Out) -> Steps[None]:
    if space := (yield from reader.skip_all(WHITE)):
        out(space)


def _take(reader: Reader, out: Out, count: int) -> None:
    text = reader.text[reader.pos : reader.pos + count]
    reader.pos += count
    out(text)
