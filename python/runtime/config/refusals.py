"""Checks shared by all parts of the configuration: ranges of values."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError
from runtime.small_file import unreadable


def check_bounds(args: ServerArgs) -> None:
    """Raise `ConfigError` for given numbers outside the bounds of their flags."""
    for field in fields(args):
        value = getattr(args, field.name)
        if isinstance(value, int | float) and field.metadata["bounds"] is not None:
            check_range(field.name, value, *field.metadata["bounds"])


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise `ConfigError` if the value of field `name` is outside its bounds. Both are allowed, except the lower one of real numbers, 0."""
    if isinstance(high, float):
        valid, limit = low < value <= high, f"above {low:g} and at most {high:g}"
    else:
        valid, limit = low <= value <= high, f"between {low} and {high}"
    if not valid:
        raise ConfigError(f"{flag_of(name)} must be {limit}; got {value}.")


def check_output(path: Path) -> None:
    """Raise `ConfigError` for an --output that cannot be written, before anything is measured."""
    try:
        writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"--output {path} cannot be written: {unreadable(error)}.") from error
    if not writable:
        raise ConfigError(f"--output {path} cannot be written. Name a file in an existing folder.")


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")
