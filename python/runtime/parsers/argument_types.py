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
_MAX_REFS = 16


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that parameter `name` may have by the schema of its function; `ANY` if it does not say."""
    properties = schema.get("properties")
    return _types(properties.get(name), schema) if isinstance(properties, Mapping) else ANY


def _types(node: object, root: Mapping[str, Any], refs: int = 0) -> frozenset[str]:
    if not isinstance(node, Mapping) or refs > _MAX_REFS:
        return ANY
    if isinstance(reference := node.get("$ref"), str):
        return _types(_resolve(reference, root), root, refs + 1)
    kinds = node.get("type")
    if isinstance(kinds, (str, list)):
        return frozenset([kinds] if isinstance(kinds, str) else filter(lambda kind: isinstance(kind, str), kinds))
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list):
        return frozenset(_NAMES.get(type(value), "string") for value in values)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := node.get(keyword), list):
            found = [_types(branch, root, refs + 1) for branch in branches]
            return frozenset().union(*found) if ANY not in found or keyword == "allOf" else ANY
    return ANY


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    node: object = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


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
    wanted = types - STRING or {"array", "object"}
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
