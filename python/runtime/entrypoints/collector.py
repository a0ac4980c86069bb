"""The garbage collector, and what lives as long as the process."""

from __future__ import annotations

import gc


def spare_start() -> None:
    """Collect once more, and never look at again what is there now.

    A full collection goes through every object; with torch loaded that takes more than a tenth of a second, in which the process takes no
    step. What the start made would be gone through again and again for nothing.
    """
    gc.collect()
    gc.freeze()
