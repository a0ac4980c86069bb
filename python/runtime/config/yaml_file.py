"""Reads YAML and refuses a key that is given twice, of which yaml takes the last value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from runtime.errors import ConfigError
from runtime.small_file import read_small, unreadable

MAX_MIB = 16


def read_text(flag: str, path: Path) -> str:
    """The text of the file that `flag` names. Raises `ConfigError`."""
    try:
        return read_small(path, MAX_MIB)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {unreadable(error)}.") from error


def parse_yaml(flag: str, path: Path, text: str, secret: bool = False) -> object:
    """The content of a file with this text. Raises `ConfigError`, which does not quote the text if it is `secret`."""
    try:
        return yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, ValueError) as error:  # as `!!bool x` raises KeyError
        why = ", or gives a name twice." if secret else f": {' '.join(str(error).split())}"
        raise ConfigError(f"{flag} {path} is not YAML{why}") from error


class _UniqueKeys(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node
