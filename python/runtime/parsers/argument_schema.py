"""The JSON schema of a function's arguments: the parts of it that tool formats need."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from runtime.constrained.json_schema import referenced
from runtime.errors import RequestError

Schema = Mapping[str, Any]

ANY = frozenset[str]()
"""The types of a parameter without a type in the schema."""
TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
MAX_READ = 50_000
"""Most parts of schemas that are read for the grammar of one request. References can make a small schema expand to a large one."""
_MAX_CHAIN, _MAX_UNIONS = 16, 128
"""Most references followed in a row, and most unions read to find one type."""
_PART_CHARS = 10


class ReadLimit:
    """Counts the parts of schemas that are read for one request."""

    def __init__(self) -> None:
        self._left = MAX_READ

    def spend(self, count: int) -> None:
        """Count parts. Raises `RequestError` beyond the limit."""
        self._left -= count
        if self._left < 0:
            advice = "Simplify them, or use tool_choice auto and no strict tool."
            raise RequestError(f"The schemas of the tools refer to too many definitions for a grammar. {advice}", "tools")


class ArgumentSchema:
    """The schema of one function.

    Args:
        root: the whole schema. The methods' argument `given` is a part of it.
        limit: shared by the functions of a request; None for no limit.
    """

    def __init__(self, root: Schema, limit: ReadLimit | None = None) -> None:
        self._root = root
        self._limit = limit

    @classmethod
    def of_tools(cls, tools: Mapping[str, Schema]) -> dict[str, ArgumentSchema]:
        """The schemas of all functions of a request, with one limit."""
        limit = ReadLimit()
        return {name: cls(schema, limit) for name, schema in tools.items()}

    @cached_property
    def whole(self) -> Schema:
        """The schema of the arguments object, with references followed."""
        return self.resolved(self._root)

    def parameter_types(self, name: str) -> frozenset[str]:
        """The JSON types that a parameter may have; `ANY` if the schema names none."""
        properties = self.whole.get("properties")
        return self.types(properties.get(name)) if isinstance(properties, Mapping) else ANY

    def types(self, given: object, seen: set[int] | None = None) -> frozenset[str]:
        """The JSON types that a part allows; `ANY` if it names none.

        Args:
            seen: identities of the unions read so far. They are not read again, because unions may refer to each other.
        """
        node = self.resolved(given)
        kinds = node.get("type")
        if isinstance(kinds, (str, list)):
            return frozenset([kinds] if isinstance(kinds, str) else filter(lambda kind: isinstance(kind, str), kinds))
        if (values := fixed_values(node)) is not None:
            return frozenset(TYPE_NAMES.get(type(value), "string") for value in values)
        seen = set() if seen is None else seen
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := node.get(keyword), list) and len(seen) < _MAX_UNIONS:
                seen.add(id(node))
                found = [self.types(branch, seen) for branch in branches if id(self.resolved(branch)) not in seen]
                return frozenset().union(*found) if ANY not in found or keyword == "allOf" else ANY
        return ANY

    def alternatives(self, given: object) -> list[Schema]:
        """The branches of a part that is a union, with references followed; the part itself if it is none."""
        found, unions, rest = list[Schema](), set[int](), deque([given])
        while rest:
            node = self.resolved(rest.popleft())
            branches = next((node[keyword] for keyword in ("anyOf", "oneOf") if isinstance(node.get(keyword), list)), None)
            if branches is None:
                found.append(node)
            elif id(node) not in unions:
                unions.add(id(node))
                rest.extendleft(reversed(branches))
        return found

    def resolved(self, given: object) -> Schema:
        """A part with its references followed; empty if it is not an object."""
        self._count()
        for _ in range(_MAX_CHAIN):
            if not isinstance(given, Mapping):
                return {}
            if not isinstance(reference := given.get("$ref"), str):
                return given
            given = referenced(self._root, reference)
        return {}

    def standalone(self, given: object) -> Schema:
        """A part together with the definitions that it may refer to."""
        self._count(self._shared_parts)
        return {**given, **self._shared} if isinstance(given, Mapping) else self._shared

    @cached_property
    def _shared(self) -> Schema:
        return {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}

    @cached_property
    def _shared_parts(self) -> int:
        return len(json.dumps(self._shared)) // _PART_CHARS

    def _count(self, parts: int = 1) -> None:
        if self._limit is not None:
            self._limit.spend(parts)


def fixed_values(node: Schema) -> list[Any] | None:
    """The values of a schema's `enum` or `const`; None without one."""
    values = [node["const"]] if "const" in node else node.get("enum")
    return values if isinstance(values, list) and values else None
