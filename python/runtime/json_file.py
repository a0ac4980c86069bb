"""Reads a file that must hold a JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that Git leaves in place of a large one."""


def check_pointer(path: Path) -> None:
    """Raise `ConfigError` if a file, which exists, is a Git LFS pointer."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ConfigError(f"{path} is only a Git LFS pointer to the file; fetch the file with 'git lfs pull', or download it")


def read_object(path: Path, missing: str = "") -> dict[str, Any]:
    """The object in a file.

    Args:
        missing: what to say if there is no such file; by default that it is missing.

    Raises:
        ConfigError: it is missing or unreadable, or holds something else.
    """
    try:
        check_pointer(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(missing or f"{path} is missing") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: it is not valid JSON: {str(error)[:120]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content
