"""A cache of folders that are built once, by one process at a time, and are either complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.errors import ConfigError


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/talon`, or `~/.cache/talon`."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "talon"


def build_once(cache_dir: Path, name: str, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """Return the folder `name` of the cache; build it if it is missing or incomplete.

    If two processes call this at once, one builds and the other waits. `build` fills a private folder on the same file system, which is
    flushed to disk and then renamed, so a crash leaves either no folder or the complete one.

    Args:
        cache_dir: created if missing.
        name: name of the folder, without separators.
        build: fills the empty folder that is passed to it.
        is_whole: a cheap check whether an existing folder is complete.

    Raises:
        ConfigError: the cache cannot be written.
    """
    final = cache_dir / name
    if is_whole(final):
        return final
    with _writable(cache_dir), _lock(cache_dir / f".{name}.lock"):
        if is_whole(final):
            return final
        _remove_leftovers(cache_dir, name)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=cache_dir))
        try:
            build(scratch)
            _publish(scratch, final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return final


@contextlib.contextmanager
def _writable(cache_dir: Path) -> Iterator[None]:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"cannot write the cache {cache_dir}: {reason}; free space there or point XDG_CACHE_HOME elsewhere") from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lock `path`; the kernel releases the lock if the process dies."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_leftovers(cache_dir: Path, name: str) -> None:
    """Delete the folders of interrupted builds. The caller must hold the lock, so that no other process is building `name`."""
    for stale in cache_dir.glob(f".{name}.*.part"):
        shutil.rmtree(stale, ignore_errors=True)


def _publish(scratch: Path, final: Path) -> None:
    scratch.chmod(0o755)
    for path in [*scratch.iterdir(), scratch]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    scratch.rename(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
