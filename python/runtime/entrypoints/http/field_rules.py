"""Rules between the fields of a body, in JSON Schema. A field that is null counts as left out."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

GIVEN: Json = {"not": {"type": "null"}}
TRUE: Json = {"const": True}
FILLED: Json = {"type": ["array", "object", "string"], "minItems": 1, "minLength": 1, "minProperties": 1}
"""An array, an object or a string that is not empty."""


def has(*names: str, **fields: Json) -> Json:
    """All of `names` are given, and all of `fields` are there and satisfy their schema."""
    wanted = {**dict.fromkeys(names, GIVEN), **fields}
    return {"type": "object", "required": list(wanted), "properties": wanted}


def any_of(*rules: Json) -> Json:
    """At least one of the rules holds."""
    return {"anyOf": list(rules)}


def at_most_one(*rules: Json) -> Json:
    """No two of the rules hold together."""
    return {"oneOf": [{"not": any_of(*rules)}, *rules]}


def exactly_one(*rules: Json) -> Json:
    """One of the rules holds, and no other."""
    return {"oneOf": list(rules)}


def never(*rules: Json) -> Json:
    """The rules do not hold all together."""
    return {"not": {"allOf": list(rules)}}


def implies(rule: Json, *others: Json) -> Json:
    """Where `rule` holds, the others hold too."""
    return {"if": rule, "then": {"allOf": list(others)}}
