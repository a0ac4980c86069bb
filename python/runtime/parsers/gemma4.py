"""Gemma 4: `<|tool_call>call:f{key:<|"|>text<|"|>,n:1}<tool_call|>`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from runtime.constrained.structural_tag import ConstString, Format, Tag, TagsWithSeparator
from runtime.parsers.argument_schema import ArgumentSchema, Schema, fixed_values
from runtime.parsers.argument_types import typed_json
from runtime.parsers.call_grammar import ANY_TEXT, CallGrammar, json_of, members, one_of, sequence, string_text
from runtime.parsers.calls import ArgumentWriter, ToolFormat, write_unended
from runtime.parsers.json_reader import MAX_DEPTH
from runtime.parsers.reader import WHITE, Malformed, Reader, Steps

MAX_GRAMMAR_DEPTH = 8
MAX_GRAMMAR_PARTS = 1000
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
QUOTE = '<|"|>'
_KEY_STOPS = (":", "{", "}", "[", "]", ",", "<tool_call|>", "<|tool_call>")
_BARE_TYPES = frozenset({"integer", "number", "boolean", "null", "string"})


class Gemma4(ToolFormat):
    """Objects with unquoted keys, and strings between `<|"|>` without escapes."""

    begins = ("<|tool_call>",)
    tags = ("<|tool_call>", "<tool_call|>", QUOTE)

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.expect("<|tool_call>")
        yield from reader.expect("call:")
        name = yield from reader.take_name(reader.take_until("{"))
        reader.start_call(name.strip())
        yield from _read_value(reader, 0)
        reader.end_arguments()
        yield from reader.skip_all(WHITE)
        yield from reader.skip("<tool_call|>")
        reader.end_call()

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        begin, schemas = "<|tool_call>call:", ArgumentSchema.of_tools(tools)
        tags = [Tag(f"{begin}{name}", _GrammarWriter(schema).members(schema.whole), "<tool_call|>") for name, schema in schemas.items()]
        return CallGrammar(tags, begin)


def _read_value(reader: Reader, depth: int) -> Steps[None]:
    """Emit one value as JSON."""
    if depth > MAX_DEPTH:
        raise Malformed
    yield from reader.skip_all(WHITE)
    opening = yield from reader.skip("{", "[", QUOTE)
    if opening == "{":
        yield from _read_object(reader, depth)
    elif opening == "[":
        yield from _read_array(reader, depth)
    elif opening == QUOTE:
        yield from ArgumentWriter(reader).string(lambda out: reader.read_until((QUOTE,), out))
        yield from reader.skip(QUOTE)
        if not reader.unknown:
            reader.accept()
    elif reader.ran_out:
        raise Malformed
    else:
        yield from _read_bare(reader)


def _read_bare(reader: Reader) -> Steps[None]:
    unended = list[str]()
    try:
        bare = (yield from reader.take_until(",", "}", "]", "\n", unended=unended.append)).strip()
    except Malformed:
        if unended:
            yield from write_unended(reader, unended[0])
        raise
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
        key = yield from reader.take_until(*(() if quoted else _KEY_STOPS), QUOTE, unended=members.unended_key)
        if quoted:
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
        if not (yield from reader.peek()):
            raise Malformed
        if not first:
            reader.arguments(", ")
        first = False
        yield from _read_value(reader, depth + 1)


class _GrammarWriter:
    """Builds the grammar of Gemma's values from a function's schema; values that are nested too deeply are omitted."""

    def __init__(self, schema: ArgumentSchema) -> None:
        self._schema = schema
        self._count = 0

    def value(self, given: object, depth: int = 0) -> Format:
        """A value of a schema."""
        nodes = self._schema.alternatives(given) if self._count < MAX_GRAMMAR_PARTS else ()
        parts = [part for node in nodes for part in self._parts(node, depth)]
        return one_of(*(parts or [Tag(QUOTE, ANY_TEXT, QUOTE)]))

    def _parts(self, node: Schema, depth: int) -> list[Format]:
        """The parts for a value of a schema without unions, one per type."""
        self._count += 1
        values = fixed_values(node)
        if values is not None and not any(isinstance(value, dict | list) for value in values):
            return [ConstString(f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)) for value in values]
        types = self._schema.types(node)
        nested = depth < MAX_GRAMMAR_DEPTH and self._count < MAX_GRAMMAR_PARTS
        parts: list[Format] = []
        if scalars := types & {"integer", "number", "boolean", "null"}:
            parts.append(json_of({"type": sorted(scalars), **{key: node[key] for key in BOUNDS if key in node}}))
        if "array" in types and nested:
            item = TagsWithSeparator([Tag("", self.value(node.get("items"), depth + 1), "")], ",")
            parts.append(sequence(ConstString("["), item, ConstString("]")))
        if "object" in types and nested:
            parts.append(self.members(node, depth))
        if "string" in types or not types:
            parts.append(Tag(QUOTE, string_text(node), QUOTE))
        return parts

    def members(self, node: Schema, depth: int = 0) -> Format:
        """An object with its properties in the order of the schema."""
        parts = members(node, lambda name, schema: sequence(ConstString(f"{name}:"), self.value(schema, depth + 1), ConstString(",")))
        return sequence(ConstString("{"), *parts, ConstString("}"))
