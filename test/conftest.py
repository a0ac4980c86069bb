"""What all tests of a process share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

FIRST = "test_storm.py"
"""The file that takes longest, and waits most of that time: started late, it would run alone at the end."""


def pytest_collection() -> None:
    """Import the modules of all tests without garbage collections, which would find next to nothing."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests of `FIRST`; all others keep their order."""
    items.sort(key=lambda item: item.path.name != FIRST)


def pytest_collection_finish() -> None:
    """Exclude those modules from later collections: each full one would visit them again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Remove what programs set up that ran in the process of a test: all later tests would log to a stream that is closed."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)
