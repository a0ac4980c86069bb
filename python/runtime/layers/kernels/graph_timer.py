"""How long work on the GPU takes, replayed from a captured graph: without the host, as it will run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch


def replay_times(run: Callable[[], object], replays: int) -> list[float]:
    """Microseconds of each of `replays` replays of `run`, whose kernels are compiled.

    Captured without `torch.cuda.graph`, which empties the allocator's cache: captures here are many.
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
