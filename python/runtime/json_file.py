"""Reads a file that must hold a JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError


def read_object(path: Path, missing: str = "") -> dict[str, Any]:
    """The object in a file.

    Args:
        missing: what to say if there is no such file; by default that it is missing.

    Raises:
        ConfigError: it is missing or unreadable, or holds something else.
    """
    try:
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
