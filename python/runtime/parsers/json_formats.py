"""Formats whose calls are JSON: Hermes and Qwen 2.5, Llama 3, Mistral, DeepSeek V3 and V3.1, Phi-4-mini, Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.constrained.structural_tag import ConstString, Tag
from runtime.parsers.call_grammar import CALL_NUMBER, CallGrammar, Schema, json_of, object_schema, sequence
from runtime.parsers.calls import ToolFormat, read_block, read_empty_call, read_json_call, read_named_call
from runtime.parsers.reader import MAX_NAME, WHITE, Malformed, Reader, Steps

_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
"""The ids that Mistral's chat templates accept."""


class Hermes(ToolFormat):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

    begins = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>")

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.expect("<tool_call>")
        yield from read_block(reader, "</tool_call>", lambda: read_json_call(reader, "</tool_call>"))

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        return CallGrammar(_objects(tools, "<tool_call>\n", "arguments", "\n</tool_call>"), "<tool_call>", separator="\n")


class Llama3(ToolFormat):
    """`{"name": "f", "parameters": {...}}`, after `<|python_tag|>` or on its own; a semicolon between calls."""

    plain_begins = ('{"name"', '{ "name"', '{"type"', '{ "type"')
    begins = ("<|python_tag|>", *plain_begins)
    tags = ("<|python_tag|>",)

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.skip_all(WHITE)
        yield from reader.skip("<|python_tag|>")
        yield from read_block(reader, None, lambda: read_json_call(reader), separators=";,")

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        return CallGrammar(_objects(tools, "", "parameters", ""), '{"name"', separator="; ")


@dataclass(frozen=True)
class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, and since version 11 `[TOOL_CALLS]f[ARGS]{...}` for each call.

    Version 11 also writes the call's id: `[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{...}`.

    Attributes:
        named: whether the grammar has the later form. Both are read.
    """

    named: bool
    begins = ("[TOOL_CALLS]",)
    tags = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.expect("[TOOL_CALLS]")
        yield from reader.skip_all(WHITE)
        if not (yield from _read_objects(reader)):
            name = yield from reader.take_name(reader.take_until("[CALL_ID]", "[ARGS]", "{"))
            marked = yield from reader.skip("[CALL_ID]")
            call_id = (yield from reader.take_until("[ARGS]", "{")) if marked else ""
            yield from reader.skip("[ARGS]")
            yield from read_named_call(reader, name, call_id if _MISTRAL_ID.fullmatch(call_id) else "")
        reader.end_call()

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        if not self.named:
            return CallGrammar(_objects(tools, "", "arguments", ""), "[TOOL_CALLS]", "[TOOL_CALLS] [", ", ", "]")
        tags = [Tag(f"[TOOL_CALLS]{name}[ARGS]", json_of(object_schema(schema)), "") for name, schema in tools.items()]
        return CallGrammar(tags, "[TOOL_CALLS]")


@dataclass(frozen=True)
class DeepSeek(ToolFormat):
    """Calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

    V3 and R1 write the type, the name, and the arguments in a fenced block; V3.1 writes only the name and the arguments.
    """

    fenced: bool
    begins = ("<｜tool▁calls▁begin｜>",)
    tags = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    )  # fmt: skip

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.expect("<｜tool▁calls▁begin｜>")
        yield from read_block(reader, "<｜tool▁calls▁end｜>", lambda: self._read_call(reader))

    def _read_call(self, reader: Reader) -> Steps[bool]:
        if not (yield from reader.skip("<｜tool▁call▁begin｜>")):
            return False
        if self.fenced:
            yield from reader.take_until("<", "\n")
            yield from reader.expect("<｜tool▁sep｜>")
        name = yield from reader.take_name(reader.take_until("<", "\n" if self.fenced else "{"))
        yield from (reader.expect("```json") if self.fenced else reader.skip("<｜tool▁sep｜>"))
        yield from read_named_call(reader, name)
        if self.fenced:
            yield from reader.skip_all(WHITE)
            yield from reader.skip("```")
        yield from reader.skip_all(WHITE)
        yield from reader.skip("<｜tool▁call▁end｜>")
        return True

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        begin, end = ("function<｜tool▁sep｜>{}\n```json\n", "\n```") if self.fenced else ("{}<｜tool▁sep｜>", "")
        tags = [
            Tag(f"<｜tool▁call▁begin｜>{begin.format(name)}", json_of(object_schema(schema)), f"{end}<｜tool▁call▁end｜>")
            for name, schema in tools.items()
        ]
        outer = "<｜tool▁calls▁begin｜>"
        return CallGrammar(tags, outer, outer, "\n" if self.fenced else "", "<｜tool▁calls▁end｜>")


class Phi4Mini(ToolFormat):
    """`<|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>`, or `functools[...]` with the same list."""

    plain_begins = ("functools[",)
    begins = ("<|tool_call|>", *plain_begins)
    tags = ("<|tool_call|>", "<|/tool_call|>")

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.skip_all(WHITE)
        yield from reader.skip("<|tool_call|>")
        yield from reader.skip_all(WHITE)
        yield from reader.skip("functools")
        if not (yield from _read_objects(reader)):
            raise Malformed
        reader.end_call()
        yield from reader.skip_all(WHITE)
        if not (yield from reader.skip("<|/tool_call|>")):
            reader.pos = reader.done
        reader.end_call()

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        return CallGrammar(_objects(tools, "", "arguments", ""), "<|tool_call|>", "<|tool_call|>[", ", ", "]<|/tool_call|>")


class KimiK2(ToolFormat):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, between two tags around all calls.

    The text before the arguments is the call's id; its number counts the calls of the conversation. The outer tags and empty arguments may
    be absent.
    """

    begins = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    tags = (
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )  # fmt: skip

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.skip_all(WHITE)
        yield from reader.skip("<|tool_calls_section_begin|>")
        yield from read_block(reader, "<|tool_calls_section_end|>", lambda: self._read_call(reader))

    def _read_call(self, reader: Reader) -> Steps[bool]:
        if not (yield from reader.skip("<|tool_call_begin|>")):
            return False
        yield from reader.skip_all(WHITE)
        kind = yield from reader.skip("functions.")
        if reader.ran_out:
            raise Malformed
        begin = yield from reader.take_name(_take_known_name(reader))
        written = begin + (yield from reader.take_until("<", "{"))
        yield from reader.skip("<|tool_call_argument_begin|>")
        name = written.rpartition(":")[0].strip()
        name, call_id = name if name in reader.tools else written, f"{kind or ''}{written}"
        yield from reader.skip_all(WHITE)
        if (yield from reader.at("<|tool_call_end|>")):
            read_empty_call(reader, name, call_id)
        else:
            yield from read_named_call(reader, name, call_id)
        yield from reader.skip_all(WHITE)
        yield from reader.skip("<|tool_call_end|>")
        return True

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        begin, middle, end = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
        tags = [
            Tag(f"{begin}{name}:", sequence(CALL_NUMBER, ConstString(middle), json_of(object_schema(schema))), end)
            for name, schema in tools.items()
        ]
        outer = "<|tool_calls_section_begin|>"
        return CallGrammar(tags, outer, outer, "", "<|tool_calls_section_end|>")


def _take_known_name(reader: Reader) -> Steps[str]:
    """Read a function's name up to a colon. Names of functions may contain colons too."""
    name = ""
    while True:
        name += yield from reader.take_until(":", "<", "{")
        if name.strip() in reader.tools or len(name) > MAX_NAME or not (yield from reader.skip(":")):
            return name
        name += ":"


def _read_objects(reader: Reader) -> Steps[bool]:
    """Read one call that is an object, or a list of them; returns False and reads nothing if there is neither."""
    yield from reader.skip_all(WHITE)
    if (yield from reader.skip("[")):
        yield from read_block(reader, "]", lambda: read_json_call(reader), separators=",")
        return True
    return (yield from read_json_call(reader))


def _objects(tools: Mapping[str, Schema], begin: str, key: str, end: str) -> list[Tag]:
    """The tags of calls that are objects with a name and arguments."""
    return [Tag(f'{begin}{{"name": "{name}", "{key}": ', json_of(object_schema(schema)), f"}}{end}") for name, schema in tools.items()]
