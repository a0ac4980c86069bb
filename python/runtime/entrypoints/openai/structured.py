"""The request fields of OpenAI and vLLM that constrain the output, and their conversion to grammars."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import Field, model_validator

from runtime.entrypoints.http.body import Body, Constraint, GrammarText, JsonSchema, Regex, SamplingFields, Unused, items, schema_text
from runtime.entrypoints.http.field_rules import TRUE, at_most_one, has, type_needs
from runtime.errors import RequestError

MAX_CHOICES = 1024
ANY_OBJECT = '{"type":"object"}'

ChoiceTexts = Annotated[
    list[Annotated[str, Len(1, 4096)]],
    items(1, MAX_CHOICES),
    Field(description=f"an array of 1 to {MAX_CHOICES} strings, of which the output is one"),
]


class NamedSchema(Body):
    """A named JSON schema in OpenAI's form. It is always enforced in full, whether `strict` is set or not."""

    name: Annotated[str, Len(1, 64)]
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    description: Unused = None
    strict: bool = False


class ResponseFormat(Body):
    """The format of the answer: free text, any JSON object, JSON that satisfies a schema, or a structural tag."""

    RULES = (type_needs("json_schema", "json_schema"),)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError("response_format.json_schema is required with type json_schema.", "response_format.json_schema")
        return self

    def constraints(self) -> list[Constraint]:
        """The grammar, or none."""
        field = "response_format"
        if self.type == "json_object":
            return [Constraint(field, "json_schema", ANY_OBJECT)]
        if self.json_schema is not None and self.type == "json_schema":
            return [Constraint(f"{field}.json_schema.schema", "json_schema", schema_text(self.json_schema.schema_))]
        if self.type == "structural_tag":
            return [Constraint(field, "structural_tag", self.model_dump_json(exclude_none=True))]
        return []


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`; at most one of its fields may be set."""

    RULES = (at_most_one(*map(has, ("choice", "grammar", "json", "regex", "structural_tag")), has(json_object=TRUE)),)

    choice: ChoiceTexts | None = None
    grammar: GrammarText | None = None
    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    json_object: bool = False
    regex: Regex | None = None
    structural_tag: GrammarText | dict[str, Any] | None = None

    def constraints(self) -> list[Constraint]:
        """The grammars that are given."""
        given = _constraints("structured_outputs.", self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            given.append(Constraint("structured_outputs.json_object", "json_schema", ANY_OBJECT))
        if self.structural_tag is not None:
            given.append(Constraint("structured_outputs.structural_tag", "structural_tag", schema_text(self.structural_tag)))
        return given


class ConstrainedFields(SamplingFields):
    """Sampling fields, and the fields of OpenAI and vLLM that constrain the output."""

    guided_choice: ChoiceTexts | None = None
    guided_decoding_backend: Unused = None
    guided_grammar: GrammarText | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Regex | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraints(self) -> list[Constraint]:
        """The grammars that the fields give."""
        given = super().constraints() + _constraints(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        for group in (self.response_format, self.structured_outputs):
            given += group.constraints() if group is not None else []
        return given


def _constraints(prefix: str, schema: Any, regex: str | None, choices: list[str] | None, grammar: str | None) -> list[Constraint]:
    """The grammars of vLLM's fields, whose names begin with `prefix`."""
    texts = {
        "json": ("json_schema", None if schema is None else schema_text(schema)),
        "regex": ("regex", regex),
        "choice": ("regex", None if choices is None else "|".join(map(escaped, choices))),
        "grammar": ("ebnf", grammar),
    }
    return [Constraint(prefix + field, kind, text) for field, (kind, text) in texts.items() if text is not None]


def escaped(text: str) -> str:
    """A regular expression that matches only `text`."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)
