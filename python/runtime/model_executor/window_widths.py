"""Window widths: assigns the tokens of a ragged verify pass to requests. On the host; no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.batch import Int32


def assign_widths(gains: npt.NDArray[np.floating], size: int, tokens: int) -> Int32:
    """Assign the tokens of a pass to the most promising drafts.

    Args:
        gains: float [n, K], expected accepted tokens of each draft; decreasing in each row, 0 for drafts that cannot be accepted.
        size: requests, including padding.
        tokens: tokens of the pass, `size` to `size` * (K + 1).

    Returns:
        int32 [size], widths in 1..K + 1 that add up to `tokens`. Tokens without an expected gain go to the last windows first, which are
        padding.
    """
    n, K = gains.shape
    widths, spare = np.ones(size, dtype=np.int32), tokens - size
    best = np.argsort(-gains, axis=None, kind="stable")[:spare]
    best = best[gains.flat[best] > 0]
    widths[:n] += np.bincount(best // K, minlength=n).astype(np.int32)
    room = (K + 1 - widths)[::-1]
    before = room.cumsum(dtype=np.int32) - room
    widths[::-1] += np.clip(spare - len(best) - before, 0, room)
    return widths
