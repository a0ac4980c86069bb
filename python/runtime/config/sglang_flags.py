"""SGLang's flags that Talon does not have: some are accepted without effect, the others are refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from runtime.errors import ConfigError

log = logging.getLogger(__name__)


class _Tables(msgspec.Struct, frozen=True):
    """`sglang_flags.json`: the names of flags, by reason."""

    no_effect: dict[str, list[str]]
    only: dict[str, dict[str, list[str]]]
    refused: dict[str, tuple[str, ...]]


_TABLES = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Tables)

NO_EFFECT = {name: why for why, names in _TABLES.no_effect.items() for name in names}
"""Accepted with a warning that says why they have no effect."""
ONLY = {name: (values, why) for why, flags in _TABLES.only.items() for name, values in flags.items()}
"""Accepted with these values, which describe what Talon does anyway, and the reason why no other value is possible."""
REFUSED = [(beginnings, why) for why, beginnings in _TABLES.refused.items()]
"""Refused, by the beginning of the name, with the reason."""


def take(name: str, values: Sequence[str]) -> bool:
    """Handle a flag of SGLang that Talon does not have; False if SGLang's tables have no such flag.

    Args:
        name: the flag without the leading dashes.
        values: its values; false and null disable it, and so does `no-` before the name.

    Raises:
        ConfigError: the flag is refused; the message says why.
    """
    asked = not name.startswith("no-") and list(values) not in (["false"], ["null"])
    name = name.removeprefix("no-")
    if name in NO_EFFECT:
        if asked:
            log.warning("--%s has no effect: %s", name, NO_EFFECT[name])
        return True
    if name in ONLY:
        accepted, why = ONLY[name]
        if asked and not set(values) <= set(accepted):
            raise ConfigError(f"--{name} {' '.join(values)} is not supported: {why}.")
        return True
    for beginnings, why in REFUSED:
        if name.startswith(beginnings):
            if asked:
                raise ConfigError(f"--{name} is not supported: {why}. Leave it out.")
            return True
    return False
