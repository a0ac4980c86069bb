"""Typed, bounded fields of a JSON request; a refusal names the field, the value and the limit."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from runtime.errors import InvalidField, UnsupportedField

MAX_SHOWN_NAME = 64


class Kind(Protocol):
    """How one field is read."""

    def read(self, name: str, value: object) -> object:
        """Return the value as the server uses it, or raise `InvalidField`."""
        ...

    def schema(self) -> dict[str, object]:
        """JSON Schema of what `read` accepts."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in [low, high]; a bool, a float and a string of digits are none."""

    low: int
    high: int

    def read(self, name: str, value: object) -> int:
        """The number itself."""
        if type(value) is not int or not self.low <= value <= self.high:
            raise refusal(name, value, f"a whole number from {self.low} to {self.high}")
        return value

    def schema(self) -> dict[str, object]:
        """An integer and its bounds."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number in [low, high], or in (low, high] with `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def read(self, name: str, value: object) -> float:
        """The number as a float."""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and self._holds(value):
            return float(value)
        low, to = ("above", "up to") if self.open_low else ("from", "to")
        raise refusal(name, value, f"a number {low} {self.low:g} {to} {self.high:g}")

    def _holds(self, value: float) -> bool:
        return math.isfinite(value) and value <= self.high and (value > self.low if self.open_low else value >= self.low)

    def schema(self) -> dict[str, object]:
        """A number and its bounds."""
        return {"type": "number", "exclusiveMinimum" if self.open_low else "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    def read(self, name: str, value: object) -> bool:
        """The flag itself."""
        if type(value) is not bool:
            raise refusal(name, value, "true or false")
        return value

    def schema(self) -> dict[str, object]:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text:
    """A string of `low` to `high` characters."""

    high: int | None = None
    low: int = 0

    def read(self, name: str, value: object) -> str:
        """The text itself."""
        if not isinstance(value, str) or len(value) < self.low or (self.high is not None and len(value) > self.high):
            raise refusal(name, value, self._limit())
        return value

    def _limit(self) -> str:
        if self.high is not None:
            return f"a string of {self.low} to {self.high} characters"
        return "a string, not empty" if self.low else "a string"

    def schema(self) -> dict[str, object]:
        """A string and its bounds."""
        bounds: dict[str, object] = {"type": "string", "minLength": self.low}
        return bounds if self.high is None else {**bounds, "maxLength": self.high}


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of `low` to `high` things of one kind; with `lone`, a single one stands for a list of one."""

    each: Kind
    high: int
    low: int = 0
    lone: bool = False

    def read(self, name: str, value: object) -> tuple[object, ...]:
        """The things as a tuple."""
        if self.lone and not isinstance(value, list):
            value = [value]
        if not isinstance(value, list) or not self.low <= len(value) <= self.high:
            raise refusal(name, value, f"a list of {self.low} to {self.high} items")
        return tuple(self.each.read(name, one) for one in value)

    def schema(self) -> dict[str, object]:
        """An array, or one item of it."""
        each = self.each.schema()
        array: dict[str, object] = {"type": "array", "items": each, "minItems": self.low, "maxItems": self.high}
        return {"anyOf": [each, array]} if self.lone else array


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one request body.

    Attributes:
        kinds: what each field must be. `null` counts as left out.
        required: fields that must be there.
        refused: fields of the protocol that this server does not implement, with the reason.
        harmless: values of refused fields that ask for nothing, and pass.
    """

    kinds: Mapping[str, Kind]
    required: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def read(self, body: object, prefix: str = "") -> dict[str, object]:
        """Return the fields that `body` gives, checked.

        Raises:
            InvalidField: a value of the wrong type or outside its bounds, or a required field left out.
            UnsupportedField: a field that this server does not know or does not implement.
        """
        if not isinstance(body, dict):
            raise refusal(prefix.rstrip(".") or "body", body, "a JSON object")
        found = {}
        for name, value in body.items():
            kind = self.kinds.get(name)
            if kind is None:
                self._refuse(prefix, name, value)
            elif value is not None:
                found[name] = kind.read(prefix + name, value)
        for name in self.required:
            if name not in found:
                raise InvalidField(prefix + name, None, "given")
        return found

    def _refuse(self, prefix: str, name: str, value: object) -> None:
        if name in self.refused:
            if value is not None and value not in self.harmless.get(name, ()):
                raise UnsupportedField(prefix + name, self.refused[name])
            return
        name = name[:MAX_SHOWN_NAME]
        near = difflib.get_close_matches(name, self.kinds, 1, cutoff=0.75)
        hint = f"unknown field, did you mean {near[0]!r}?" if near else "unknown field"
        raise UnsupportedField(prefix + name, hint)

    def schema(self) -> dict[str, object]:
        """JSON Schema of the body."""
        properties = {name: kind.schema() for name, kind in self.kinds.items()}
        return {"type": "object", "properties": properties, "required": list(self.required), "additionalProperties": False}


def refusal(name: str, value: object, limit: str) -> InvalidField:
    """An `InvalidField` that shows a large value by its size, not its content."""
    if isinstance(value, str):
        shown: object = value if len(value) <= 60 else f"{value[:40]}… ({len(value)} characters)"
    elif isinstance(value, (list, tuple)):
        shown = value if len(value) <= 4 and all(isinstance(one, (int, float)) for one in value) else _Plain(f"a list of {len(value)}")
    elif isinstance(value, dict):
        shown = _Plain("an object")
    else:
        shown = _Plain({None: "null", True: "true", False: "false"}[value]) if value is None or isinstance(value, bool) else value
    return InvalidField(name, shown, limit)


class _Plain(str):
    """Text whose `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
