"""Times of GPU work, replayed from a captured graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from runtime.layers.kernels.graph_timer import replay_times


def median_us(run: Callable[[], object]) -> float:
    """The median of nine replays, for results."""
    return statistics.median(_times(run, 9))


def best_us(run: Callable[[], object]) -> float:
    """The minimum of five replays, for choosing between candidates."""
    return min(_times(run, 5))


def _times(run: Callable[[], object], replays: int) -> list[float]:
    run()  # compile
    return replay_times(run, replays)
