"""A disk cache of compiled CUDA programs, so that a server compiles each program only at its first start."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)
DIGEST_BYTES = hashlib.sha256().digest_size


class CodeCache:
    """A folder with one file per program, named by the hash of everything its code depends on.

    Processes may share it: files are created atomically. A file begins with a digest of the code, so a damaged one is recompiled. If the
    folder cannot be read or written, or if other users can write to it, there is a warning and programs are compiled.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._warned = False

    def code(self, inputs: Iterable[bytes], compile_code: Callable[[], bytes]) -> bytes:
        """The machine code of a program: from disk, or compiled and stored there.

        Args:
            inputs: everything that the code depends on: source, options, compiler.
            compile_code: called if the code is not cached.
        """
        file = self._folder / f"{_name(inputs)}.cubin"
        owned = self._is_own()
        found = self._read(file) if owned else None
        if found is None:
            found = compile_code()
            if owned:
                self._write(file, found)
        return found

    def _is_own(self) -> bool:
        """Whether the folder is missing, or only this user can write to it: its code runs on the GPU."""
        try:
            status = self._folder.stat()
        except FileNotFoundError:
            return True
        except OSError as error:
            self._warn(f"cannot use {self._folder}: {error.strerror}")
            return False
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            self._warn(f"other users may write to {self._folder}")
            return False
        return True

    def _read(self, file: Path) -> bytes | None:
        """The code of a file; None if it is missing or damaged."""
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cannot read {file}: {error.strerror}")
            return None
        digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if not code or hashlib.sha256(code).digest() != digest:
            log.warning("CUDA program cache: %s is damaged and will be recompiled", file)
            return None
        return code

    def _write(self, file: Path, code: bytes) -> None:
        """Store code under a name, if the folder is writable."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(prefix=".", suffix=".part", dir=self._folder)
        except OSError as error:
            self._warn(f"cannot write {self._folder}: {error.strerror}")
            return
        try:
            with os.fdopen(handle, "wb") as part:
                part.write(hashlib.sha256(code).digest() + code)
            Path(scratch).replace(file)
        except OSError as error:
            self._warn(f"cannot write {file}: {error.strerror}")
            with suppress(OSError):
                Path(scratch).unlink()

    def _warn(self, what: str) -> None:
        """Log the first problem of this process."""
        if not self._warned:
            self._warned = True
            log.warning("CUDA program cache: %s; set XDG_CACHE_HOME to a writable folder", what)


def _name(inputs: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in inputs:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
