"""Bounds what libraries keep: free memory in glibc's allocator, and oneDNN's compiled kernels; and what the garbage collector visits."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable

MIB = 1 << 20
ALLOCATOR = {"MALLOC_ARENA_MAX": (-8, 2), "MALLOC_MMAP_THRESHOLD_": (-3, 32 * MIB), "MALLOC_TRIM_THRESHOLD_": (-1, 64 * MIB)}
"""glibc's variable of each limit, its number in malloc.h, and its value.

By default glibc has eight arenas per core, each with holes of its own. A lower threshold for mapped blocks would cost page faults
in every step.
"""
PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN compiles GEMM kernels by number of rows, 0.2 MiB each, and keeps the latest 1024; so does torch, in a cache of its own.

Recompiling one takes 0.6 ms.
"""
TRIM_SECONDS = 10.0
"""How often free memory goes back to the system, which takes some ms; steps of many sizes touch ever more of it."""


def bound_kept_memory() -> None:
    """Set the limits that the environment does not set, and give free memory back from time to time.

    Every step has shapes of its own, so without the limits the process would grow for hours. On another C library than glibc
    only the limits of kernels take effect. Call it before torch is loaded and before other threads start.
    """
    for variable, capacity in PRIMITIVES.items():
        os.environ.setdefault(variable, capacity)
    libc = ctypes.CDLL(None)
    try:
        mallopt, trim = libc.mallopt, libc.malloc_trim
    except AttributeError:
        return
    for variable, (number, value) in ALLOCATOR.items():
        if variable not in os.environ:
            mallopt(number, value)
    threading.Thread(target=_trim_forever, args=(trim,), name="trim", daemon=True).start()


def give_back_memory() -> None:
    """Give free memory back to the system once; does nothing on another C library than glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def freeze_gc() -> None:
    """Collect garbage, then exclude all remaining objects from later collections.

    A full collection visits every object. With torch loaded it stalls the process for over a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def _trim_forever(trim: Callable[[int], int]) -> None:
    """Call malloc_trim, which runs without the interpreter's lock."""
    pause = threading.Event()
    while not pause.wait(TRIM_SECONDS):
        trim(0)
