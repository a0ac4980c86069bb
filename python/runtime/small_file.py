"""Reads small text files, without filling memory if the path is something else; writes files whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_MIB = 256


def read_small(path: Path, max_mib: int = MAX_MIB) -> str:
    """The text of a UTF-8 file or pipe, with or without a byte order mark.

    Raises:
        OSError: it cannot be read, is neither a regular file nor a pipe, or has more than `max_mib` MiB.
        UnicodeDecodeError: it is not UTF-8.
    """
    found, most = path.stat(), max_mib << 20
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISFIFO(found.st_mode):
        raise OSError(errno.EINVAL, "it is neither a regular file nor a pipe")
    if found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size >> 20:,} MiB; the limit is {max_mib} MiB")
    with path.open(encoding="utf-8-sig") as file:  # the size of a pipe is not known
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {max_mib} MiB")
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it keeps its old content if the disk is full or the program ends, where the folder takes a second file.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()  # a link stays a link
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        path.write_bytes(content)
        return
    partial = path.with_name(f".{os.getpid()}.part")
    try:
        partial.write_bytes(content)
        if path.exists():
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_pipe(path: Path) -> bool:
    """Whether it is a pipe; False if it is missing or out of reach."""
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except OSError:
        return False


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    why = error.strerror or str(error)
    return why[:1].lower() + why[1:]
