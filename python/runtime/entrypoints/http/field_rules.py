"""Rules between the fields of a body, in JSON Schema. A null field counts as absent."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

NULL: Json = {"type": "null"}
GIVEN: Json = {"not": NULL}
TRUE: Json = {"const": True}
TEXT: Json = {"type": "string", "minLength": 1}
ITEMS: Json = {"type": "array", "minItems": 1}


def has(*names: str, **fields: Json) -> Json:
    """All of `names` are present, and all of `fields` are present and satisfy their schema."""
    wanted = {**dict.fromkeys(names, GIVEN), **fields}
    return {"required": list(wanted), "properties": wanted}


def lacks(*names: str, **fields: Json) -> Json:
    """None of `names` is present, and each of `fields` is absent or satisfies its schema."""
    return {"properties": {**dict.fromkeys(names, NULL), **fields}}


def any_of(*rules: Json) -> Json:
    """At least one of the rules holds."""
    return {"anyOf": list(rules)}


def type_needs(kind: str, *names: str, **fields: Json) -> Json:
    """A body whose `type` is `kind` has these fields; the arguments are those of `has`."""
    return any_of(lacks(type={"not": {"enum": [kind]}}), has(*names, **fields))


def one_of(*rules: Json) -> Json:
    """Exactly one of the rules holds."""
    return {"oneOf": list(rules)}


def at_most_one(*rules: Json) -> Json:
    """No two of the rules hold together."""
    return one_of({"not": any_of(*rules)}, *rules)
