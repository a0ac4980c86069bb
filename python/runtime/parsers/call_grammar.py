"""The grammar of tool calls, as parts of a structural tag in xgrammar's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.constrained.structural_tag import (
    AnyText,
    ConstString,
    Format,
    JsonSchema,
    Or,
    Regex,
    Sequenced,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)
from runtime.errors import RequestError
from runtime.parsers.argument_schema import ArgumentSchema, Schema, fixed_values
from runtime.text.tool_prompt import ARGUMENTS

ANY_TEXT = AnyText()
CALL_NUMBER = Regex("[0-9]{1,4}")


def json_of(schema: Schema) -> JsonSchema:
    """JSON that satisfies a schema."""
    return JsonSchema(dict(schema))


def sequence(*parts: Format) -> Format:
    """One part after the other."""
    return parts[0] if len(parts) == 1 else Sequenced(list(parts))


def one_of(*parts: Format) -> Format:
    """Any of the parts."""
    return parts[0] if len(parts) == 1 else Or(list(parts))


def optional(part: Format) -> Format:
    """The part or nothing."""
    return one_of(ConstString(""), part)


def object_schema(schema: Schema) -> Schema:
    """The schema of a function's arguments object; a function without a schema has no arguments.

    A schema that allows other types too allows only objects here.

    Raises:
        RequestError: the schema allows no object.
    """
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = schema.get("type", "object")
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        return {**schema, "type": "object"}
    advice = "Give them the type object, or use tool_choice auto and no strict tool."
    raise RequestError(f"The parameters of a tool have the type {json.dumps(kinds)}, so no call satisfies them. {advice}", "tools")


def members(node: Schema, write: Callable[[str, object], Format]) -> list[Format]:
    """The properties of an object, each converted by `write` from its name and schema; those that are not required are optional parts."""
    properties, required = node.get("properties"), node.get("required")
    found = properties.items() if isinstance(properties, Mapping) else ()
    names = required if isinstance(required, list) else []
    return [write(name, part) if name in names else optional(write(name, part)) for name, part in found]


def text_value(given: object, schema: ArgumentSchema) -> Format:
    """A value in plain text, without quotes around strings. `given` is its schema, a part of `schema`."""
    types = schema.types(given)
    if types and "string" not in types:
        return json_of(schema.standalone(given))
    parts = [_text_of(node, schema) for node in schema.alternatives(given)]
    return ANY_TEXT if ANY_TEXT in parts else one_of(*parts)


def _text_of(node: Schema, schema: ArgumentSchema) -> Format:
    """A value of a schema without unions."""
    if (values := fixed_values(node)) is not None:
        return one_of(*(ConstString(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for value in values))
    types = schema.types(node)
    return string_text(node) if not types or "string" in types else json_of(schema.standalone(node))


def string_text(node: Schema) -> Format:
    """A string without quotes; it must match the schema's pattern if that is anchored."""
    pattern = node.get("pattern") if node.get("type") == "string" else None
    return Regex(pattern) if isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$") else ANY_TEXT


def _example(part: Format) -> str:
    match part:
        case ConstString(text):
            return text
        case Tag():
            return part.begin + _example(part.content) + part.ends[0]
        case Sequenced(parts):
            return "".join(map(_example, parts))
        case Or(parts):
            return _example(parts[-1])
        case JsonSchema():
            return ARGUMENTS
    return "0" if part == CALL_NUMBER else "<value>"


@dataclass(frozen=True)
class CallGrammar:
    """How a format writes the calls of a request.

    Attributes:
        tags: one for each function.
        trigger: the text that the first call begins with.
        begin, separator, end: the texts before, between and after calls.
        single: whether an answer has at most one call.
    """

    tags: Sequence[Tag]
    trigger: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    single: bool = False

    def example(self) -> str:
        """One call, with placeholders for its variable parts."""
        return f"{self.begin}{_example(self.tags[0])}{self.end}"

    def calls(self, parallel: bool) -> Format:
        """Exactly one call, or one or more if `parallel`, without other text."""
        first_only = self.single or not parallel
        calls = TagsWithSeparator(list(self.tags), self.separator, at_least_one=True, stop_after_first=first_only)
        return sequence(ConstString(self.begin), calls, ConstString(self.end)) if self.begin else calls

    def text_with_calls(self, parallel: bool) -> Format:
        """Any text; calls in it follow the grammar."""
        tags = (
            [Tag(self.begin, CallGrammar(self.tags, "", separator=self.separator).calls(parallel), self.end)] if self.begin else self.tags
        )
        return TriggeredTags([self.trigger], list(tags), stop_after_first=not parallel)
