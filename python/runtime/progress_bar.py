"""Progress bars on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm as ProgressBar

from runtime.log import writes_json


class _Stderr:
    """Stderr that drops what it cannot write: a full disk must not end a start."""

    def write(self, text: str) -> None:
        """Write, or drop the text."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, or drop what is buffered."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def progress_bar(items: Iterable[Any] | None = None, *, shown: bool, **options: Any) -> ProgressBar:
    """A progress bar; hidden where the log has JSON lines. `options` are tqdm's."""
    return ProgressBar(items, file=_Stderr(), dynamic_ncols=True, disable=not shown or writes_json(), **options)
