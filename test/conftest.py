"""What all tests of a process share."""

from __future__ import annotations

import gc


def pytest_collection() -> None:
    """Import the modules of all tests without garbage collections, which would find next to nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude those modules from later collections: each full one would visit them again."""
    gc.freeze()
    gc.enable()
