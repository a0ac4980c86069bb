"""What the tests in one process share."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Exclude the modules of all tests from garbage collections: each full one would visit them again."""
    gc.collect()
    gc.freeze()
