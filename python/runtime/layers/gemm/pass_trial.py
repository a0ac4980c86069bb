"""Chooses among GEMM kernels of almost equal speed by the time of a pass.

A kernel that is a little faster alone may make a pass slower: it may leave no room on a multiprocessor for the next kernel, which would
otherwise prefetch its weights, or its blocks may end far apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, MutableMapping
from dataclasses import replace

import torch

from runtime.layers.gemm.gemm import GemmKey, PassTimer
from runtime.layers.gemm.timings import GemmChoice, GemmTimings, Timed

log = logging.getLogger(__name__)
MOST_ROWS = 32
"""Maximum rows of these passes. With 64 rows of Llama-3-8B on an H200, the fastest kernels alone are also the fastest in a pass."""
NEAR = 1.12
"""A kernel is timed within a pass if alone it takes at most this many times as long as the fastest."""
GAIN = 0.003
"""The fastest kernel alone is replaced if the pass becomes faster by this fraction; differences below it are noise."""
ROUNDS = 2
"""Each kernel is timed this often, in turn with the others; the shortest time counts."""


def choose_within_passes(
    gemms: Iterable[tuple[torch.dtype, GemmKey]], timings: GemmTimings, choices: MutableMapping[GemmKey, GemmChoice], timer: PassTimer
) -> dict[GemmKey, Timed]:
    """Time the kernels that are almost as fast as the chosen one within passes, one GEMM after another, and keep the best in `timings`.

    Args:
        gemms: dtype of the weights and key of timed GEMMs; those of other layers than `timer` has are left alone.
        choices: the present choices; updated.

    Returns:
        Results of the GEMMs with several such kernels.
    """
    start, decided, in_layers = time.perf_counter(), dict[GemmKey, Timed](), {gemm.key(0)[:-1] for gemm in timer.gemms}
    for dtype, key in gemms:
        rows, timed = key[-1], timings.known(dtype, key)
        if timed is None or key[:-1] not in in_layers or rows > min(MOST_ROWS, timer.most_rows):
            continue
        near = [choice for choice, micros in timed.micros.items() if micros <= NEAR * timed.micros[timed.choice]]
        if len(near) > 1:
            decided[key] = _best(key, timed, near, choices, timer)
            choices[key] = decided[key].choice
            timings.replace(dtype, key, decided[key])
    log.info("timed %d GEMMs in passes in %.1f s", len(decided), time.perf_counter() - start)
    return decided


def _best(key: GemmKey, timed: Timed, near: list[GemmChoice], choices: MutableMapping[GemmKey, GemmChoice], timer: PassTimer) -> Timed:
    """The choice of `near` with which passes are fastest; the fastest alone if no other is clearly faster."""
    times = dict.fromkeys(near, float("inf"))
    for choice in ROUNDS * near:
        choices[key] = choice
        times[choice] = min(times[choice], timer.micros(key[-1]))
    best = min(times, key=times.__getitem__)
    return replace(timed, choice=best if times[best] < times[timed.choice] * (1 - GAIN) else timed.choice, in_pass=times)
