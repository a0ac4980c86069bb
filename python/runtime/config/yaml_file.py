"""Reads YAML and refuses a key that is given twice, of which yaml takes the last value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: Path) -> object:
    """The content of a file in UTF-8. Raises `OSError`, `UnicodeDecodeError`, or `yaml.YAMLError`, for a key given twice too."""
    return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)


class _UniqueKeys(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node
