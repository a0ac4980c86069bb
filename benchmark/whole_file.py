"""Writes files atomically."""

from __future__ import annotations

from pathlib import Path

from runtime import small_file


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically, and create its folder: readers see either the old or the new text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    small_file.write_whole(file, text.encode())
