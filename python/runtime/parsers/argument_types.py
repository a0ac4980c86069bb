"""Converts arguments that the model wrote as plain text to JSON of the types in the function's schema."""

from __future__ import annotations

import ast
import json
import re

from runtime.parsers.argument_schema import TYPE_NAMES

STRING = frozenset({"string"})
_INTEGER = re.compile(r"[-+]?[0-9]+")


def typed_json(text: str, types: frozenset[str]) -> str:
    """Convert `text` to JSON of one of `types`, or to a string if it matches none. Without types, only arrays and objects are parsed."""
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
    kind = TYPE_NAMES.get(type(value))
    if kind in wanted or (kind == "integer" and "number" in wanted):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> object:
    """`text` parsed as JSON, else as a Python literal, else unchanged."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text
