"""Times GPU work as it will run: replayed from a captured graph, without the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch


def median_micros(run: Callable[[], object], replays: int, calls: int = 1) -> float:
    """Microseconds per call of `run`, which must be compiled: the median of `replays` replays of `calls` consecutive calls.

    Outputs of a call are freed before the next one, as in a model.
    """

    def all_calls() -> None:
        for _ in range(calls):
            run()

    return statistics.median(replay_times(all_calls, replays)) / calls


def replay_times(run: Callable[[], object], replays: int) -> list[float]:
    """Microseconds of each of `replays` replays of `run`, whose kernels are already compiled.

    Does not use `torch.cuda.graph`, because that empties the allocator's cache each time.
    """
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
    return [a.elapsed_time(b) * 1000 for a, b in pairwise(events)]
