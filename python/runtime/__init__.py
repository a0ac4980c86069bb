"""Talon: an LLM server whose speciality is EAGLE speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.version import __version__

if TYPE_CHECKING:
    from runtime.entrypoints.engine import Engine

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> object:
    """Load `Engine` on first use, so that importing a light module stays light."""
    if name == "Engine":
        from runtime.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
