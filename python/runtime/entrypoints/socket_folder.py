"""The private folder that holds the sockets of one server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

from runtime.errors import ConfigError

_PREFIX = "talon-"
_MAX_BASE_BYTES = 60
"""With a longer path the address of a socket could exceed its limit."""


def make_socket_folder() -> str:
    """Make a folder that only this user can enter, and remove the folders of servers that were killed.

    It is made in $XDG_RUNTIME_DIR if that is private to this user, else in the temporary folder.

    Raises:
        ConfigError: no file can be made there.
    """
    try:
        return _make_in(_base())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"No folder can be made for the server's sockets: {reason}. Set TMPDIR to a writable folder.") from error


def _make_in(base: str) -> str:
    for left in Path(base).glob(f"{_PREFIX}*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and _is_own_folder(left) and not psutil.pid_exists(int(pid)):
            _remove_unlocked(left)
    made = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX)  # never closed: the lock lasts as long as this process
    return made


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder whose lock is free. A pid would not do: the server may run in another container that shares the temporary folder."""
    with contextlib.suppress(OSError):  # another server is removing it, or its own server still runs
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(handle)


def _base() -> str:
    private = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(private) and _fits(private) and _is_own_folder(Path(private)) and os.access(private, os.W_OK):
        return private
    return tempfile.gettempdir() if _fits(tempfile.gettempdir()) else "/tmp"


def _fits(folder: str) -> bool:
    return len(os.fsencode(folder)) <= _MAX_BASE_BYTES


def _is_own_folder(path: Path) -> bool:
    """Whether `path` is a folder that belongs to this user and that no other user can enter. A symbolic link is not a folder."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
