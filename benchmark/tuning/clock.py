"""Times of work on the GPU, replayed from a captured graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from runtime.layers.kernels.graph_timer import replay_times


def median_us(run: Callable[[], object]) -> float:
    """The middle one of nine replays: what a figure is."""
    return statistics.median(_times(run, 9))


def best_us(run: Callable[[], object]) -> float:
    """The shortest of five replays, so that a hiccup picks no winner."""
    return min(_times(run, 5))


def _times(run: Callable[[], object], replays: int) -> list[float]:
    run()  # compiles
    return replay_times(run, replays)
