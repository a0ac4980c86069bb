"""Chooses the fastest of several attention kernels for a kind of pass, timed once on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

from runtime.distributed.parallel_group import ALONE, ParallelGroup

log = logging.getLogger(__name__)
CALLS, REPLAYS = 8, 5
"""Calls per captured graph, like the consecutive layers of a model, and replays of the graph."""


class KernelChoices:
    """The choices made so far, kept for the life of a model. All ranks of `group` must ask in the same order; they get the same answers."""

    def __init__(self, group: ParallelGroup = ALONE) -> None:
        self._group = group
        self._chosen: dict[Hashable, str] = {}

    def fastest(self, key: tuple[Hashable, ...], runs: Mapping[str, Callable[[], object]]) -> str:
        """The name of the fastest of `runs`, whose kernels are compiled; cached by key."""
        if key not in self._chosen:
            name, line = self._group.agree(_measure(runs) if self._group.rank == 0 else ("", ""))
            self._chosen[key] = name
            log.info("attention %s: %s", " ".join(map(str, key)), line)
        return self._chosen[key]

    def known(self, key: tuple[Hashable, ...]) -> bool:
        """Whether `fastest` has a cached answer."""
        return key in self._chosen


def _measure(runs: Mapping[str, Callable[[], object]]) -> tuple[str, str]:
    from runtime.layers.kernels.graph_timer import median_micros

    times = {name: median_micros(run, REPLAYS, CALLS) for name, run in runs.items()}
    best = min(times, key=times.__getitem__)
    return best, f"{best} ({', '.join(f'{name} {time:.1f} µs' for name, time in times.items())})"
