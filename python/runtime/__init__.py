"""Talon: an LLM server whose speciality is EAGLE speculative decoding."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from runtime.version import __version__

if TYPE_CHECKING:
    from runtime.entrypoints.engine import Engine

__all__ = ["Engine", "__version__"]


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C needs no traceback while a command is being imported either."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if os.path.basename((sys.argv or [""])[0]) in ("-m", "talon"):  # `python -m runtime.COMMAND` or the installed command
    sys.excepthook = _end_quietly


def __getattr__(name: str) -> object:
    """Load `Engine` on first use, so that importing a light module stays light."""
    if name == "Engine":
        from runtime.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
