"""Request fields of other servers that this server refuses, or accepts without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class _Tables(msgspec.Struct, frozen=True):
    """`refused.json`: refused fields by reason, pairs of (harmless values, their fields), and fields without effect."""

    refused: dict[str, list[str]]
    harmless: list[tuple[list[Any], list[str]]]
    no_effect: frozenset[str]


_TABLES = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Tables)

REFUSED = {name: why for why, names in _TABLES.refused.items() for name in names}
"""Why each field is refused, at every level of a body. A body that declares such a field accepts it."""
HARMLESS = {name: values for values, names in _TABLES.harmless for name in names}
"""Values of refused fields that are accepted because they have no effect. Null is always accepted."""
NO_EFFECT = _TABLES.no_effect
"""Fields that cannot change an answer of this server, at every level of a body: options for images, routing, tracing or reporting."""


def changes_nothing(name: str, value: object) -> bool:
    """Whether a value of a refused field is harmless; of a field in `REFUSED`, clients also send a list with one value per prompt."""
    values = value if isinstance(value, list) and value and name in REFUSED else [value]
    return _is_harmless(name, value) or all(_is_harmless(name, one) for one in values)


def _is_harmless(name: str, value: object) -> bool:
    """Whether one value is harmless; 0 and 1 are not false and true."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in HARMLESS.get(name, ()))
