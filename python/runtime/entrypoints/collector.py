"""The garbage collector and the objects that live as long as the process."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Collect garbage, then exclude all remaining objects from later collections.

    A full collection visits every object. With torch loaded it stalls the process for over a tenth of a second.
    """
    gc.collect()
    gc.freeze()
