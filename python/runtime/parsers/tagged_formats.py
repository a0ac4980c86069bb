"""Formats that write each parameter between tags: Qwen3-Coder, MiMo, Seed-OSS, MiniMax-M2 and GLM-4.5 to 4.7."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from runtime.constrained.structural_tag import ConstString, Format, Tag
from runtime.parsers.argument_schema import ArgumentSchema, Schema
from runtime.parsers.argument_types import STRING, typed_json
from runtime.parsers.call_grammar import ANY_TEXT, CallGrammar, members, sequence, text_value
from runtime.parsers.calls import ArgumentWriter, ToolFormat, read_block, write_unended
from runtime.parsers.json_reader import escaped
from runtime.parsers.reader import WHITE, Malformed, Out, Reader, Steps

ReadUntil = Callable[[Reader, Sequence[str], Out], Steps[str | None]]
"""`Reader.read_until`, or a function like it."""
MAX_VALUE = 1 << 24
"""Most characters of a value that is not a string; such a value is held back until it is complete."""
_OPEN_REFERENCE = re.compile(r"&(?:#[0-9]*|#[xX][0-9a-fA-F]*|[A-Za-z0-9]{0,32})\Z")
"""A character reference that the next characters may continue; the longest name has 32 characters."""


@dataclass(frozen=True, kw_only=True)
class Tagged(ToolFormat):
    """`BEGIN FUNCTION name NAME_END (KEY key KEY_END value VALUE_END)* FUNCTION_END END`, with white space between the tags.

    Attributes:
        begin, end: tags around the calls; a call may also begin with `function` if that is not empty.
        function, function_end: tags around one call; both may be empty.
        name_ends: tags that may follow the name; only the first of them is consumed with it.
        value_begin: the tag before a value, if `key_end` does not serve as one.
        line_breaks: whether a value has its own lines.
        shared: whether `begin` and `end` enclose all calls together, not each call.
        escapes: whether values contain character references such as `&amp;`.
    """

    begin: str
    end: str
    function: str = ""
    function_end: str = ""
    name_ends: tuple[str, ...]
    key: str
    key_end: str
    value_begin: str = ""
    value_end: str
    line_breaks: bool = False
    shared: bool = False
    escapes: bool = False

    @property
    def begins(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `ToolFormat`."""
        return (self.begin, self.function) if self.function else (self.begin,)

    @property
    def tags(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `ToolFormat`."""
        return (self.begin, self.end, self.key, self.key_end, self.value_begin, self.value_end)

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat`."""
        yield from reader.skip_all(WHITE)
        yield from reader.skip(self.begin)
        yield from read_block(reader, self.end, lambda: self._read_call(reader))

    def _read_call(self, reader: Reader) -> Steps[bool]:
        if self.function and not (yield from reader.skip(self.function)):
            return False
        name = (yield from reader.take_name(reader.take_until(*self.name_ends))).strip()
        yield from reader.skip(self.name_ends[0])
        reader.start_call(name)
        schema = ArgumentSchema(reader.tools.get(name, {}))
        arguments = ArgumentWriter(reader)
        while True:
            yield from reader.skip_all(WHITE)
            if not (yield from reader.skip(self.key)):
                break
            key = (yield from reader.take_until(*self._key_stops, unended=arguments.unended_key)).strip()
            if not (yield from reader.skip(self.key_end)):
                raise Malformed
            arguments.key(key)
            yield from self._read_value(reader, arguments, schema.parameter_types(key))
        if self.function_end:
            yield from reader.expect(self.function_end)
        elif (yield from reader.at(self.end)) is None:
            raise Malformed
        arguments.close()
        reader.end_arguments()
        return True

    @cached_property
    def _key_stops(self) -> list[str]:
        """The end of a parameter's name, and the tags that no name contains."""
        return [self.key_end, *filter(None, (self.value_begin, self.value_end, self.key, self.function_end, self.end))]

    def _read_value(self, reader: Reader, arguments: ArgumentWriter, types: frozenset[str]) -> Steps[None]:
        if self.value_begin:
            yield from reader.expect(self.value_begin)
        if self.line_breaks:
            yield from reader.skip("\n")
        if types == STRING:
            read = read_unescaped if self.escapes else Reader.read_until
            yield from arguments.string(lambda out: self._read_text(reader, read, out))
        else:
            value = yield from self._take_value(reader, types)
            reader.arguments(typed_json(self._plain(value), types))
        yield from reader.skip(*self._value_ends)
        if not reader.unknown:
            reader.accept()

    @cached_property
    def _value_ends(self) -> tuple[str, ...]:
        return (f"\n{self.value_end}", self.value_end) if self.line_breaks else (self.value_end,)

    @cached_property
    def _call_ends(self) -> tuple[str, ...]:
        """The tags that end the call, and with it a value whose own end is damaged."""
        end = self.function_end or self.end
        return (f"\n{end}", end)

    def _read_text(self, reader: Reader, read: ReadUntil, out: Out) -> Steps[str | None]:
        """Pass a value to `out` up to its end, or else up to the end of the call; returns that tag, or None if there is neither.

        A tag that ends calls may also be a part of a value, namely if the end of a value follows before the next call, or may have followed
        in an output that was cut off.
        """
        calls = [f"{self.function or self.begin}{name}" for name in reader.tools]
        while (tag := (yield from read(reader, (*self._value_ends, *self._call_ends), out))) in self._call_ends and tag:
            following = yield from reader.first_of(*self._value_ends, *calls)
            if following in calls or (following is None and not reader.cut_off):
                break
            reader.pos += len(tag)
            out(tag)
        return tag

    def _take_value(self, reader: Reader, types: frozenset[str]) -> Steps[str]:
        """Return a value. Raises `Malformed` if there is no end; if the model ended its answer in the value, it is written first."""
        unended = list[str]()
        try:
            return (yield from reader.take(lambda out: self._read_text(reader, Reader.read_until, out), MAX_VALUE, unended.append))
        except Malformed:
            if unended and types and "string" not in types:
                yield from write_unended(reader, unended[0])
            elif unended:
                text = _OPEN_REFERENCE.sub("", unended[0]) if self.escapes else unended[0]
                reader.arguments(f'"{escaped(self._plain(text))}')
            raise

    def _plain(self, text: str) -> str:
        return html.unescape(text) if self.escapes else text

    def grammar(self, tools: Mapping[str, Schema]) -> CallGrammar:
        """See `ToolFormat`."""
        line = "\n" if self.function else ""
        schemas = ArgumentSchema.of_tools(tools)
        if self.shared:
            tags = [self._call_tag(name, schema, "", "\n") for name, schema in schemas.items()]
            return CallGrammar(tags, self.begin, f"{self.begin}\n", "", self.end)
        tags = [self._call_tag(name, schema, f"{self.begin}{line}", f"{line}{self.end}") for name, schema in schemas.items()]
        return CallGrammar(tags, self.begin, separator="\n")

    def _call_tag(self, name: str, schema: ArgumentSchema, begin: str, end: str) -> Tag:
        name_end = self.name_ends[0].strip()
        return Tag(f"{begin}{self.function}{name}{name_end}\n", self._members(schema), f"{self.function_end}{end}")

    def _members(self, schema: ArgumentSchema) -> Format:
        """All parameters in the order of the schema."""
        line = "\n" if self.line_breaks else ""

        def parameter(name: str, node: object) -> Format:
            value = text_value(node, schema)
            end = self.value_end if value is ANY_TEXT else f"{line}{self.value_end}"
            return sequence(Tag(f"{self.key}{name}{self.key_end}{self.value_begin}{line}", value, end), ConstString("\n"))

        return sequence(*(members(schema.whole, parameter) or [ConstString("")]))


def read_unescaped(reader: Reader, tags: Sequence[str], out: Out) -> Steps[str | None]:
    """Like `Reader.read_until`, for text with character references; one that is not complete at the end of the text is dropped."""
    held = ""

    def unescape(text: str) -> None:
        nonlocal held
        text = held + text
        open_reference = _OPEN_REFERENCE.search(text)
        end = open_reference.start() if open_reference else len(text)
        held = text[end:]
        out(html.unescape(text[:end]))

    tag = yield from reader.read_until(tags, unescape)
    if tag:
        out(html.unescape(held))
    return tag


QWEN3_CODER = Tagged(
    begin="<tool_call>", end="</tool_call>", function="<function=", function_end="</function>", name_ends=(">",),
    key="<parameter=", key_end=">", value_end="</parameter>", line_breaks=True,
)  # fmt: skip
MIMO = replace(QWEN3_CODER, line_breaks=False, escapes=True)
SEED_OSS = replace(QWEN3_CODER, begin="<seed:tool_call>", end="</seed:tool_call>", line_breaks=False)
MINIMAX_M2 = Tagged(
    begin="<minimax:tool_call>", end="</minimax:tool_call>", function='<invoke name="', function_end="</invoke>", name_ends=('">',),
    key='<parameter name="', key_end='">', value_end="</parameter>", shared=True,
)  # fmt: skip
GLM47 = Tagged(
    begin="<tool_call>", end="</tool_call>", name_ends=("\n", "<arg_key>", "</tool_call>"), key="<arg_key>", key_end="</arg_key>",
    value_begin="<arg_value>", value_end="</arg_value>",
)  # fmt: skip
