"""Arguments that the model wrote as plain text, as JSON of the types that the function's schema allows."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

ANY = frozenset[str]()
"""The types of a parameter that the schema does not describe."""
STRING = frozenset({"string"})
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_MAX_DEPTH = 16


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that parameter `name` may have by the schema of its function; `ANY` if it does not say."""
    properties = schema.get("properties")
    return schema_types(properties.get(name), schema) if isinstance(properties, Mapping) else ANY


def schema_types(node: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a part of the schema `root` allows; `ANY` if it does not say."""
    node = resolved(node, root)
    if depth > _MAX_DEPTH:
        return ANY
    kinds = node.get("type")
    if isinstance(kinds, (str, list)):
        return frozenset([kinds] if isinstance(kinds, str) else filter(lambda kind: isinstance(kind, str), kinds))
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list):
        return frozenset(_NAMES.get(type(value), "string") for value in values)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := node.get(keyword), list):
            found = [schema_types(branch, root, depth + 1) for branch in branches]
            return frozenset().union(*found) if ANY not in found or keyword == "allOf" else ANY
    return ANY


def resolved(node: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of the schema `root`, its references followed; empty if it is no object."""
    for _ in range(_MAX_DEPTH):
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
