"""The base of all request bodies, and the field types that several of them share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, get_args

from annotated_types import Interval, Len
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from runtime.entrypoints.http.field_rules import NULL, Json, at_most_one, has
from runtime.entrypoints.http.refused import REFUSED, changes_nothing
from runtime.errors import RequestError
from runtime.sampling_params import (
    GRAMMAR_KINDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    NO_DEFAULTS,
    Bias,
    DraftSteps,
    Int64,
    MinP,
    Penalty,
    RepetitionPenalty,
    SamplingDefaults,
    SamplingParams,
    Temperature,
    TopK,
    TopP,
)

MAX_PROMPTS = 256


def items(low: int, high: int | None = None) -> Any:
    """Bounds of an array's length. Validation stops at the first wrong item, so that a large wrong body costs little."""
    return Field(min_length=low, max_length=high, fail_fast=True)


def entries(count: int) -> BeforeValidator:
    """Refuse an object of more than `count` entries before validating any of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", "too many entries")
        return value

    return BeforeValidator(check)


Name = Annotated[str, Len(0, 256)]
Text = Annotated[str, Len(1)]
TokenId = Annotated[int, Interval(ge=0, le=MAX_TOKENS)]
TokenIds = Annotated[list[TokenId], items(1)]
Choices = Annotated[int, Interval(ge=1, le=MAX_N)]
TopLogprobs = Annotated[int, Interval(ge=0, le=MAX_TOP_LOGPROBS)]
StopText = Annotated[str, Len(1, MAX_STOP_CHARS)]
Unused = Annotated[Any, Field(description="Accepted without effect.")]


def unsupported(field: str, why: str) -> PydanticCustomError:
    """The error of a field of a body that this server does not support."""
    return PydanticCustomError("unsupported", "{field} is not supported", {"field": field, "why": why})


def unsupported_type(kind: str, why: str) -> PydanticCustomError:
    """The error of a value of the field `type` that this server does not support."""
    return PydanticCustomError("unsupported_type", "{kind} is not supported", {"kind": kind, "why": why})


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """In the JSON schema of a body, allow null for every optional field, and add the rules between fields."""
    for name in schema.get("properties", {}).keys() - set(schema.get("required", ())):
        node = schema["properties"][name]
        if "anyOf" in node:
            node["anyOf"] = [one for one in node["anyOf"] if one != NULL] + [NULL]
        elif node.keys() & {"type", "$ref", "const", "enum", "oneOf"}:
            outer = {key: node.pop(key) for key in ("default", "title") if key in node}
            schema["properties"][name] = {"anyOf": [node, NULL], **outer}
    if rules := [rule for base in model.__mro__ if issubclass(base, Body) for rule in vars(base).get("RULES", ())]:
        schema["allOf"] = rules


class Body(BaseModel):
    """A JSON object. A null field counts as absent, unknown fields are ignored, and types are never converted.

    `RULES` are the rules between fields that the JSON schema states; validators enforce them. Test data generators multiply out their
    alternatives, so a body with many fields states only some of its rules.

    `OTHER_TYPES` tells the client what to send instead of a value of `type` that is not listed; with "", such a value gets the usual error.
    `ALSO_REFUSED` says why this body refuses fields that are not among `REFUSED`.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, json_schema_extra=_describe)
    RULES: ClassVar[tuple[Json, ...]] = ()
    OTHER_TYPES: ClassVar[str] = ""
    ALSO_REFUSED: ClassVar[Mapping[str, str]] = {}
    _refused_here: ClassVar[Mapping[str, str]] = {}
    _types: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Compute why this body refuses fields, and the values of its field `type`."""
        cls._refused_here = {name: why for name, why in {**REFUSED, **cls.ALSO_REFUSED}.items() if name not in cls.model_fields}
        cls._types = get_args(cls.model_fields["type"].annotation) if cls.OTHER_TYPES else ()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if cls.OTHER_TYPES and isinstance(kind := data.get("type"), str) and kind not in cls._types:
            raise unsupported_type(kind, cls.OTHER_TYPES)
        for name in cls._refused_here.keys() & data.keys():
            if not changes_nothing(name, data[name]):
                raise unsupported(name, cls._refused_here[name])
        return {name: value for name, value in data.items() if value is not None} if None in data.values() else data


LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias],
    Field(description=f"an object of at most {MAX_LOGIT_BIAS} entries, from a token id to a number between -100 and 100"),
    Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
    Len(0, MAX_LOGIT_BIAS),
    entries(MAX_LOGIT_BIAS),
]


GrammarText = Annotated[str, Len(1, MAX_GRAMMAR_CHARS)]
Regex = Annotated[GrammarText, Field(json_schema_extra={"format": "regex"})]
_JSON_SCHEMA = r"^\s*(\{|true\s*$|false\s*$)"
JsonSchemaText = Annotated[GrammarText, Field(pattern=_JSON_SCHEMA, json_schema_extra={"contentMediaType": "application/json"})]
JsonSchema = Annotated[
    JsonSchemaText | dict[str, Any],
    Field(description=f"a JSON schema, as an object or as JSON text of at most {MAX_GRAMMAR_CHARS} characters"),
]

StructuralTag = Annotated[
    JsonSchemaText | dict[str, Any],
    Field(description=f"a structural tag, as an object or as JSON text of at most {MAX_GRAMMAR_CHARS} characters"),
]


def schema_text(schema: str | dict[str, Any]) -> str:
    """A JSON schema as text."""
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)


class RoutingFields(Body):
    """SGLang's fields for routers and logs, which have no effect here."""

    background: Unused = None
    conversation_id: Unused = None
    custom_labels: Unused = None
    external_trace_header: Unused = None
    log_metrics: Unused = None
    no_logs: Unused = None
    routing_key: Unused = None


class Constraint(NamedTuple):
    """A grammar of a request: the field that contains it, and its kind and text as in `SamplingParams`."""

    field: str
    kind: str
    text: str


class SamplingFields(Body):
    """The sampling fields that all generating endpoints share, with the bounds of `SamplingParams`.

    A field that is null or absent takes the server's default, which `/get_model_info` shows.
    """

    RULES = (at_most_one(*map(has, GRAMMAR_KINDS)),)

    ebnf: GrammarText | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool = False
    json_schema: JsonSchema | None = None
    logit_bias: LogitBias = {}
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    regex: Regex | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Int64 | None = None
    skip_special_tokens: bool = True
    speculative_num_steps: DraftSteps | None = None
    stop: StopText | Annotated[list[StopText], items(0, MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], items(0, MAX_STOP_IDS)] = []
    structural_tag: StructuralTag | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None

    def constraints(self) -> list[Constraint]:
        """The grammars in the fields."""
        given = [(kind, getattr(self, kind)) for kind in GRAMMAR_KINDS]
        return [Constraint(kind, kind, schema_text(value)) for kind, value in given if value is not None]

    def grammar_names(self) -> dict[str, str]:
        """For `Call.params`: the field to name in an error about the grammar, by grammar kind."""
        return {kind: each.field for each in self.constraints() for kind in GRAMMAR_KINDS}

    def sampling(self, max_new_tokens: int, min_new_tokens: int, defaults: SamplingDefaults = NO_DEFAULTS) -> SamplingParams:
        """The engine's parameters; `defaults` apply to fields that are absent from the request."""
        given: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields if name not in GRAMMAR_KINDS}
        fields = {**defaults.given(), **{name: value for name, value in given.items() if value is not None}}
        fields["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()} or None
        fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        fields["stop_token_ids"] = tuple(self.stop_token_ids)
        constraints = self.constraints()
        if len(constraints) > 1:
            raise RequestError(f"{constraints[0].field} and {constraints[1].field} cannot be combined.", constraints[1].field)
        fields |= {each.kind: each.text for each in constraints}
        return SamplingParams(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, **fields)
