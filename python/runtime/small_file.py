"""Reads small text files, without filling memory or blocking if the path is something else."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

MAX_MIB = 256


def read_small(path: Path, max_mib: int = MAX_MIB) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `max_mib` MiB.
        UnicodeDecodeError: it is not UTF-8.
    """
    found = path.stat()  # opening a named pipe could block
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if found.st_size > max_mib << 20:
        raise OSError(errno.EFBIG, f"it has {found.st_size >> 20:,} MiB; the limit is {max_mib} MiB")
    return path.read_text(encoding="utf-8-sig")


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    why = error.strerror or str(error)
    return why[:1].lower() + why[1:]
