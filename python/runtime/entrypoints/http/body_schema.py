"""The JSON schema of a request body, from which error messages are made and unknown fields are found."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from annotated_types import Interval
from pydantic import BaseModel, ValidationError

from runtime.entrypoints.http.refused import NO_EFFECT, REFUSED
from runtime.errors import InvalidField, MissingField, RequestError, UnsupportedField, UnsupportedType
from runtime.sampling_params import MAX_TOKENS, number_limit

Json = dict[str, Any]
B = TypeVar("B", bound=BaseModel)
LENGTHS = ("max_completion_tokens", "max_new_tokens", "max_output_tokens", "max_tokens")
"""Fields that limit the output tokens."""


def read_body(model: type[B], value: object, context: int = MAX_TOKENS) -> B:
    """Validate a body. Raises `RequestError` with a sentence about the field at fault. `context`: as for `BodySchema`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BodySchema(model, context).refusal(error.errors()) from None


class BodySchema:
    """The JSON schema of one request body. A `description` completes the sentence "FIELD must be ...".

    `context`: the context length, the largest number of output tokens that messages name.
    """

    def __init__(self, model: type[BaseModel], context: int = MAX_TOKENS) -> None:
        self._context = context
        self._root: Json = {**_json_schema(model), "description": ""}
        self._definitions: Json = self._root.get("$defs", {})
        self._known_forms: dict[int, list[Json]] = {}

    def refusal(self, errors: Sequence[Any]) -> RequestError:
        """The error for the client, made from pydantic's errors."""
        error = max(errors, key=_progress)
        node, path, param, at = self._root, "", "", ""
        for part in error["loc"]:
            child = None if node.get("description") else self._child(node, part)
            if child is None:
                at += f"[{part}]" if isinstance(part, int) else ""  # a string is the name of a union's branch
                continue
            node = self._plain(child)
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
            param = path if isinstance(part, str) else param
        if error["type"] == "unsupported":
            return UnsupportedField(f"{path}.{error['ctx']['field']}".lstrip("."), error["ctx"]["why"])
        if error["type"] == "unsupported_type":
            return UnsupportedType(f"{path}.type", error["ctx"]["kind"], error["ctx"]["why"])
        if not path:
            return RequestError("The body must be a JSON object.", "body")
        if error["type"] == "missing":
            return MissingField(path, param)
        if error["type"] == "required":
            return MissingField(f"{path}.{error['ctx']['field']}", f"{path}.{error['ctx']['field']}")
        forms, value = self._forms(node), error["input"]
        if path.rpartition(".")[2] in LENGTHS:
            forms = [{**form, "maximum": min(form["maximum"], self._context)} if "maximum" in form else form for form in forms]
        if isinstance(value, float) and abs(value) >= 2**64 and value.is_integer() and any(form.get("type") == "integer" for form in forms):
            value = int(value)  # the parser returns large integers as floats
        limit = node.get("description") or " or ".join(dict.fromkeys(map(_limit, forms)))
        refusal = InvalidField(path, value, limit, at=at and path + at)
        refusal.param = param
        return refusal

    def unknown(self, value: object, node: Json | None = None, path: str = "") -> Iterator[str]:
        """Yield the names of fields of the valid body `value` that are not in the schema, without array indices."""
        node = self._root if node is None else node
        if isinstance(value, dict) and self._has_fields(node):
            for name, inner in value.items():
                child = self._child(node, name)
                if child is not None:
                    yield from self.unknown(inner, child, f"{path}{name}.")
                elif inner is not None and name not in REFUSED and name not in NO_EFFECT:
                    yield path + name
        elif isinstance(value, list) and (items := self._child(node, 0)) is not None and self._has_fields(items):
            for inner in value:
                yield from self.unknown(inner, items, path)

    def _has_fields(self, node: Json) -> bool:
        return any("properties" in form for form in self._forms(node))

    def _plain(self, node: Json) -> Json:
        """A node without the alternative null; if one alternative remains, that alternative."""
        left = [one for one in node.get("anyOf", ()) if one.get("type") != "null"]
        return left[0] if len(left) == 1 else node

    def _forms(self, node: Json) -> list[Json]:
        """The alternatives of a node except null. Cached by node, because a body may have thousands of values of one node."""
        found = self._known_forms.get(id(node))
        if found is None:
            found = self._known_forms[id(node)] = self._find_forms(node)
        return found

    def _find_forms(self, node: Json) -> list[Json]:
        while "$ref" in node:
            node = self._definitions[node["$ref"].rpartition("/")[2]]
        if "anyOf" in node:
            return [form for each in node["anyOf"] for form in self._forms(each)]
        return [] if node.get("type") == "null" else [node]

    def _child(self, node: Json, part: str | int) -> Json | None:
        for form in self._forms(node):
            entry = form.get("additionalProperties")
            child = form.get("items") if isinstance(part, int) else form.get("properties", {}).get(part, entry)
            if isinstance(child, dict):
                return child
        return None


def _progress(error: Any) -> tuple[list[float], int]:
    """How far validation came before an error. In a union, the branch that came furthest is the one that the client meant.

    An array that is too long was not read at all; it ranks below any branch that read an item, and above the others.
    """
    read: list[float] = [part for part in error["loc"] if isinstance(part, int)]
    return [*read, 0.5] if error["type"] == "too_long" else read, len(error["loc"])


@functools.cache
def _json_schema(model: type[BaseModel]) -> Json:
    """The schema of a model, cached: it takes up to 60 ms, and several endpoints share bodies."""
    return model.model_json_schema()


def _limit(form: Json) -> str:
    """What a value must be to match one form, to complete the sentence "FIELD must be ..."."""
    match form.get("type"):
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            bounds = Interval(gt=form.get("exclusiveMinimum"), ge=form.get("minimum"), le=form["maximum"])
            return number_limit(kind == "integer", bounds)
        case "string" if "const" in form:
            return json.dumps(form["const"])
        case "string" if "enum" in form:
            return "one of " + ", ".join(map(json.dumps, form["enum"]))
        case "string":
            return "a string" + _count(form.get("minLength", 0), form.get("maxLength"), "character")
        case "array":
            return "an array" + _count(form.get("minItems", 0), form.get("maxItems"), "item")
        case _:
            return "an object"


def _count(low: int, high: int | None, noun: str) -> str:
    if high is not None:
        return f" of {low} to {high} {noun}s" if low else f" of at most {high} {noun}s"
    return f" of at least {low} {noun}{'s' * (low > 1)}" if low else ""
