"""Chooses among GEMM kernels of almost equal speed by the time of a pass.

A kernel that is a little faster alone may make a pass slower: it may leave no room on a multiprocessor for the next kernel, which would
otherwise prefetch its weights, or its blocks may end far apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace

import torch

from runtime.layers.gemm.gemm import GemmKey, PassTimer
from runtime.layers.gemm.timings import GemmChoice, GemmTimings, Timed

log = logging.getLogger(__name__)
MOST_ROWS = 16
"""Maximum rows of these passes. With 64 rows of Llama-3-8B on an H200, the fastest kernels alone are also the fastest in a pass."""
NEAR = 1.12
"""A kernel is timed within a pass if alone it takes at most this many times as long as the fastest."""
MOST_RIVALS = 3
"""Maximum number of kernels of a GEMM that are timed within passes."""
GAIN = 0.003
"""The fastest kernel alone is replaced if the pass becomes faster by this fraction; differences below it are noise."""
ROUNDS = 2
"""Each kernel is timed this often, in turn with the others; the shortest time counts."""


Timing = tuple[torch.dtype, GemmKey]
"""Dtype of the weights and key of a timed GEMM."""


def rivals(gemms: Iterable[Timing], timings: GemmTimings, timer: PassTimer) -> dict[Timing, list[GemmChoice]]:
    """The fastest kernels alone, best first, of the `gemms` that have several of almost equal speed in passes of `timer`."""
    in_layers, found = {gemm.key(0)[:-1] for gemm in timer.gemms}, dict[Timing, list[GemmChoice]]()
    for dtype, key in gemms:
        timed = timings.known(dtype, key)
        if timed is not None and key[:-1] in in_layers and key[-1] <= min(MOST_ROWS, timer.most_rows):
            fastest = sorted(timed.micros, key=timed.micros.__getitem__)[:MOST_RIVALS]
            near = [choice for choice in fastest if timed.micros[choice] <= NEAR * timed.micros[timed.choice]]
            if len(near) > 1:
                found[dtype, key] = near
    return found


def choose_within_passes(
    near: Mapping[Timing, Sequence[GemmChoice]], timings: GemmTimings, choices: MutableMapping[GemmKey, GemmChoice], timer: PassTimer
) -> dict[GemmKey, Timed]:
    """Time kernels of almost equal speed within passes, one GEMM after another, and keep the best in `timings`.

    Args:
        near: as returned by `rivals`; their kernels are compiled.
        choices: the present choices; updated.

    Returns:
        The results.
    """
    start, decided = time.perf_counter(), dict[GemmKey, Timed]()
    for (dtype, key), kernels in near.items():
        timed = timings.known(dtype, key)
        assert timed is not None
        decided[key] = _best(key, timed, kernels, choices, timer)
        choices[key] = decided[key].choice
        timings.replace(dtype, key, decided[key])
    log.info("timed %d GEMMs in passes in %.1f s", len(decided), time.perf_counter() - start)
    return decided


def _best(
    key: GemmKey, timed: Timed, kernels: Sequence[GemmChoice], choices: MutableMapping[GemmKey, GemmChoice], timer: PassTimer
) -> Timed:
    """The kernel with which passes are fastest; the fastest alone if no other is clearly faster."""
    times = dict.fromkeys(kernels, float("inf"))
    for choice in ROUNDS * list(kernels):
        choices[key] = choice
        times[choice] = min(times[choice], timer.micros(key[-1]))
    best = min(times, key=times.__getitem__)
    return replace(timed, choice=best if times[best] < times[timed.choice] * (1 - GAIN) else timed.choice, in_pass=times)
