"""Times of work on the GPU, replayed from a captured graph."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch


def replay_times(run: Callable[[], object], replays: int) -> list[float]:
    """Microseconds of each replay. `run` goes once before it is captured, so that its kernels are compiled.

    Captured without `torch.cuda.graph`, which empties the allocator's cache: a sweep captures thousands.
    """
    run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        run()
        graph.capture_end()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1000 for a, b in itertools.pairwise(events)]


def median_us(run: Callable[[], object]) -> float:
    """The middle one of nine replays: what a figure is."""
    return statistics.median(replay_times(run, 9))


def best_us(run: Callable[[], object]) -> float:
    """The shortest of five replays, so that a hiccup picks no winner."""
    return min(replay_times(run, 5))
