"""Arguments that the model wrote as plain text, as JSON of the types that the function's schema allows."""

from __future__ import annotations

import ast
import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

ANY = frozenset[str]()
"""The types of a parameter that the schema does not describe."""
STRING = frozenset({"string"})
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_MAX_CHAIN = 16
"""References followed one after the other."""


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that parameter `name` may have by the schema of its function; `ANY` if it does not say."""
    properties = resolved(schema, schema).get("properties")
    return schema_types(properties.get(name), schema) if isinstance(properties, Mapping) else ANY


def schema_types(given: object, root: Mapping[str, Any], seen: set[int] | None = None) -> frozenset[str]:
    """The JSON types that a part of the schema `root` allows; `ANY` if it does not say.

    Args:
        seen: identities of the unions visited so far, which are not visited again: they may refer to each other in many ways.
    """
    node = resolved(given, root)
    kinds = node.get("type")
    if isinstance(kinds, (str, list)):
        return frozenset([kinds] if isinstance(kinds, str) else filter(lambda kind: isinstance(kind, str), kinds))
    if (values := fixed_values(node)) is not None:
        return frozenset(_NAMES.get(type(value), "string") for value in values)
    seen = set() if seen is None else seen
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := node.get(keyword), list):
            seen.add(id(node))
            found = [schema_types(branch, root, seen) for branch in branches if id(resolved(branch, root)) not in seen]
            return frozenset().union(*found) if ANY not in found or keyword == "allOf" else ANY
    return ANY


def fixed_values(node: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    values = [node["const"]] if "const" in node else node.get("enum")
    return values if isinstance(values, list) and values else None


def alternatives(given: object, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a value satisfies one, by a part of the schema `root`: the branches of its unions, references followed."""
    found, unions, rest = list[Mapping[str, Any]](), set[int](), deque([given])
    while rest:
        node = resolved(rest.popleft(), root)
        branches = next((node[keyword] for keyword in ("anyOf", "oneOf") if isinstance(node.get(keyword), list)), None)
        if branches is None:
            found.append(node)
        elif id(node) not in unions:
            unions.add(id(node))
            rest.extendleft(reversed(branches))
    return found


def resolved(node: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of the schema `root`, its references followed; empty if it is no object."""
    for _ in range(_MAX_CHAIN):
        if not isinstance(node, Mapping):
            return {}
        if not isinstance(reference := node.get("$ref"), str):
            return node
        node = root
        for part in filter(None, reference.removeprefix("#").split("/")):
            node = node.get(part) if isinstance(node, Mapping) else None
    return {}


def typed_json(text: str, types: frozenset[str]) -> str:
    """`text` as JSON of one of `types`; as a string if it is none of them. Without types only arrays and objects are taken as JSON."""
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        digits = bare.lstrip("+-").lstrip("0") or "0"
        return f"-{digits}" if bare.startswith("-") else digits
    wanted = types - STRING if types else {"array", "object"}
    value = _parsed(bare)
    kind = _NAMES.get(type(value))
    if kind in wanted or (kind == "integer" and "number" in wanted):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> object:
    """`text` read as JSON, else as a Python literal, else as it is."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text
