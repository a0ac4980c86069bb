"""A sample of JSON schemas of the kinds that JSONSchemaBench and the JSON Schema test suite hold."""

from __future__ import annotations

from typing import Any

import numpy as np

Schema = dict[str, Any]
NAMES = ("name", "age", "tags", "größe", "日本", "a b", "x-y", "id", "value", "kind", "é", "items", "n0", "flag")
TREE: Schema = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}
PATTERNS = ("^[a-z]{1,8}$", "^(left|right)$", r"^\d{3}-\d{4}$", "^[A-Z][a-z]{0,5}( [A-Z])?$", r"^#[0-9a-f]{6}$", r"^\w{2,6}\.(txt|md)$")
FORMATS = ("ipv4", "ipv6", "uuid", "email")


class Schemas:
    """Draws schemas: nested, recursive, unions, enumerations, patterns, bounds, closed and open objects, Unicode."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def draw(self) -> Schema:
        """One schema; every sixth is recursive."""
        if self._rng.random() < 1 / 6:
            return self._recursive()
        return self._value(3)

    def _pick(self, options: Any) -> Any:
        return options[int(self._rng.integers(len(options)))]

    def _int(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def _value(self, depth: int) -> Schema:
        simple = [self._string, self._enum, self._const, self._number, self._pattern, self._constant_type]
        nested = [self._object, self._object, self._array, self._union, self._tuple, self._all_of]
        return self._pick(simple if depth == 0 else simple + 2 * nested)(depth)

    def _string(self, depth: int) -> Schema:
        least = self._int(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._int(0, 6)}

    def _pattern(self, depth: int) -> Schema:
        return {"type": "string", "pattern": self._pick(PATTERNS)} if self._int(0, 2) else {"type": "string", "format": self._pick(FORMATS)}

    def _enum(self, depth: int) -> Schema:
        pool = ["a", "b", "größer", "日本", 'quo"te', "back\\slash", 1, -2, 2.5, None, True, "", "\n", [1, "x"], {"k": None}]
        chosen = self._rng.permutation(len(pool))[: self._int(1, 5)]
        return {"enum": [pool[i] for i in chosen]}

    def _const(self, depth: int) -> Schema:
        return {"const": self._pick(["fixed", 7, None, {"a": [1, 2]}, "ünï"])}

    def _number(self, depth: int) -> Schema:
        low = self._int(-50, 50)
        if self._int(0, 1):
            bounds = {"minimum": low, "maximum": low + self._int(0, 100)}
            return {"type": "integer", **bounds, **self._pick([{}, {"exclusiveMinimum": low - 1}])}
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + self._int(1, 9) + 0.5}

    def _constant_type(self, depth: int) -> Schema:
        return {"type": self._pick(["boolean", "null", ["boolean", "null"], ["null", "boolean"]])}

    def _object(self, depth: int) -> Schema:
        chosen = self._rng.permutation(len(NAMES))[: self._int(0, 3)]
        names = [NAMES[i] for i in chosen]
        schema: Schema = {"type": "object", "properties": {name: self._value(depth - 1) for name in names}}
        schema["required"] = [name for name in names if self._int(0, 1)]
        extra = self._int(0, 3)
        schema["additionalProperties"] = {"type": "boolean"} if extra == 0 else False
        if extra == 1:
            schema |= {"title": "T", "description": "d", "$comment": "c"}
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._int(0, 2)
        return {"type": "array", "items": self._value(depth - 1), "minItems": least, "maxItems": least + self._int(0, 2)}

    def _tuple(self, depth: int) -> Schema:
        parts = [self._value(depth - 1) for _ in range(self._int(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth - 1) for _ in range(self._int(2, 3))]}

    def _all_of(self, depth: int) -> Schema:
        first, second = {"type": "integer", "minimum": self._int(-9, 0)}, {"maximum": self._int(1, 9)}
        return {"allOf": [first, second]}

    def _recursive(self) -> Schema:
        kinds: list[Schema] = [
            {"$ref": "#/$defs/node", "$defs": {"node": TREE}},
            {
                "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "maxItems": 2}},
                "type": "object",
                "properties": {"tree": {"$ref": "#/$defs/list"}},
                "required": ["tree"],
                "additionalProperties": False,
            },
            {
                "definitions": {
                    "expr": {
                        "anyOf": [
                            {"type": "integer", "minimum": 0, "maximum": 9},
                            {
                                "type": "object",
                                "properties": {"op": {"enum": ["+", "÷"]}, "l": {"$ref": "#/definitions/expr"}},
                                "required": ["op", "l"],
                                "additionalProperties": False,
                            },
                        ]
                    }
                },
                "$ref": "#/definitions/expr",
            },
        ]
        return self._pick(kinds)
