"""Checks shared by all parts of the configuration: ranges of values."""

from __future__ import annotations

import math
import os
from pathlib import Path

from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError


def check_ranges(args: ServerArgs, **bounds: tuple[int, int]) -> None:
    """Raise `ConfigError` for given values outside `bounds`, by field name; both ends are allowed."""
    for name, (low, high) in bounds.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{flag_of(name)} must be between {low} and {high}; got {value}.")


def check_positive(args: ServerArgs, **limits: float) -> None:
    """Raise `ConfigError` for given values that are not above 0 or exceed their limit."""
    for name, limit in limits.items():
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and 0.0 < value <= limit):
            raise ConfigError(f"{flag_of(name)} must be above 0 and at most {limit:g}; got {value}.")


def check_output(path: Path) -> None:
    """Raise `ConfigError` for an --output that cannot be written, before anything is measured."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written. Name a file in an existing folder.")


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")
