"""Rejects invalid and unsatisfiable JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from runtime.errors import GrammarError

KIND = "json_schema"
MAX_DEPTH = 128
"""Levels of nesting."""
MAX_ROUNDS = 16
"""Rounds of the search for a finite value; schemas that people write need two."""
FREE_NAMES = ({"type": "string"}, {}, True)
"""Schemas that any name of a property satisfies."""
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri", "uri-reference"}
    | {"iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex"}
)
"""The formats that JSON Schema 2020-12 defines. Other formats, such as pydantic's `path`, restrict nothing."""
VALUES = ("const", "default", "enum", "examples")
"""Keywords that contain values, not schemas."""
BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords that contain schemas by name."""


def load_json_schema(text: str) -> dict[str, Any]:
    """The schema; {} for `true`. Raises `GrammarError` if `text` is not a JSON schema, or if only endless values satisfy it."""
    schema = load_json(KIND, text)
    if not isinstance(schema, dict | bool):
        raise GrammarError(KIND, "A schema is an object.")
    if schema is False:
        raise GrammarError(KIND, "No value satisfies the schema false.")
    schema = {} if schema is True else schema
    try:
        finite = _Finite(schema).finite(schema)
    except RecursionError as error:
        raise GrammarError(KIND, "Its references form a chain that is too long.") from error
    if not finite:
        raise GrammarError(KIND, "It refers to itself without an end, so no finite value satisfies it.")
    return schema


def load_for_llguidance(text: str) -> dict[str, Any]:
    """The schema as llguidance accepts it. Raises `GrammarError` as `load_json_schema` does, and for values that llguidance would round."""
    schema = without_notes(load_json_schema(text))
    if rounded := next(_rounded_integers(schema), None):
        raise GrammarError(KIND, f"The integer {str(rounded)[:40]} in const or enum cannot be enforced exactly; use a string.")
    return schema


def _rounded_integers(part: Any, in_value: bool = False) -> Iterator[int]:
    """Integers in `const` and `enum` that float64, llguidance's type of numbers, does not hold. It writes those from 2^63 with zeros."""
    if isinstance(part, int) and in_value and (abs(part) >= 2**63 or float(part) != part):
        yield part
    elif isinstance(part, list):
        for inner in part:
            yield from _rounded_integers(inner, in_value)
    elif isinstance(part, dict):
        for name, inner in part.items():
            if in_value or name not in VALUES:
                yield from _rounded_integers(inner, in_value)
            elif name in ("const", "enum"):
                yield from _rounded_integers(inner, in_value=True)


def without_notes(schema: Any) -> Any:
    """The schema without keywords that restrict nothing but that llguidance refuses: `propertyNames` that allow all names (zod writes them
    for records), formats that JSON Schema does not define, and `uniqueItems: false`.
    """
    if isinstance(schema, list):
        return [without_notes(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part for name, part in schema.items() if not _restricts_nothing(name, part)}
    return {name: part if name in VALUES else _without_notes_in(name, part) for name, part in kept.items()}


def _restricts_nothing(keyword: str, part: Any) -> bool:
    match keyword:
        case "propertyNames":
            return part in FREE_NAMES
        case "format":
            return isinstance(part, str) and part not in FORMATS
        case "uniqueItems":
            return part is False
    return False


def _without_notes_in(keyword: str, part: Any) -> Any:
    if keyword in BY_NAME and isinstance(part, dict):
        return {name: without_notes(inner) for name, inner in part.items()}
    return without_notes(part)


def load_json(kind: str, text: str) -> Any:
    """The value of JSON text, nested at most `MAX_DEPTH` deep. Raises `GrammarError` if it is not JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(kind, f"It is not JSON: {error}.") from error
    if deeper_than(value, MAX_DEPTH):
        raise GrammarError(kind, f"It is nested more than {MAX_DEPTH} levels deep.")
    return value


def deeper_than(value: object, limit: int) -> bool:
    """Whether arrays and objects are nested more than `limit` levels deep."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(limit):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, (list, dict))]
        if not level:
            return False
    return bool(level)


def referenced(root: Any, reference: str) -> Any:
    """The schema at a pointer into the document `root`; True for any other reference, such as an anchor."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    value = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return True
    return value


class _Finite:
    """Determines whether a schema has a finite value: the least fixed point over its references.

    The answer yes may be wrong; the answer no is always right.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._finite = set[str]()
        self._visited = set[str]()

    def finite(self, schema: Any) -> bool:
        """Whether `schema` has a finite value."""
        for _ in range(MAX_ROUNDS):
            known = len(self._finite)
            self._visited.clear()
            if self._of(schema):
                return True
            if len(self._finite) == known:
                return False
        return True

    def _of(self, schema: Any) -> bool:
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return True
        if isinstance(reference := schema.get("$ref"), str) and not self._of_reference(reference):
            return False
        for name in ("anyOf", "oneOf"):
            branches = schema.get(name)
            if isinstance(branches, list) and branches and not any(self._of(branch) for branch in branches):
                return False
        parts = schema.get("allOf")
        if isinstance(parts, list) and not all(self._of(part) for part in parts):
            return False
        kinds = schema.get("type")
        kinds = {kinds} if isinstance(kinds, str) else set(map(str, kinds)) if kinds and isinstance(kinds, list) else {"any"}
        if kinds - {"object", "array"}:
            return True
        return ("object" in kinds and self._object(schema)) or ("array" in kinds and self._array(schema))

    def _of_reference(self, reference: str) -> bool:
        if reference not in self._finite and reference not in self._visited:
            self._visited.add(reference)
            if self._of(referenced(self._root, reference)):
                self._finite.add(reference)
        return reference in self._finite

    def _object(self, schema: dict[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return True
        return all(self._of(properties[name]) for name in required if isinstance(name, str) and name in properties)

    def _array(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems")
        if not isinstance(least, int) or least < 1:
            return True
        first = schema.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        rest = schema.get("items") if len(first) < least else True
        return all(self._of(part) for part in first) and self._of(rest)
