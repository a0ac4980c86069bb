"""Writes the results of a run, where a full disk or a closed stdout costs none of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def append(file: Path, line: str) -> None:
    """Append a line, or nothing of it. Raises OSError."""
    size = file.stat().st_size if file.is_file() else None
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")
    except OSError:
        if size is not None:
            os.truncate(file, size)
        raise


def say(text: str) -> None:
    """Print a line. The first failure is reported on stderr; later text is dropped."""
    try:
        print(text, flush=True)
    except OSError as error:
        complain(f"stdout cannot be written: {why(error)}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at exit, and fails again


def complain(text: str) -> None:
    """Print a line of this program on stderr."""
    print(f"bench_serving: {text}", file=sys.stderr)


def why(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read or written."""
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
