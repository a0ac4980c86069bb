"""Bounds the memory that libraries retain, and the objects that the garbage collector visits."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable

MIB = 1 << 20
ALLOCATOR = {"MALLOC_ARENA_MAX": (-8, 2), "MALLOC_MMAP_THRESHOLD_": (-3, 32 * MIB), "MALLOC_TRIM_THRESHOLD_": (-1, 64 * MIB)}
"""By glibc's environment variable: the option's number in malloc.h, and its value.

By default glibc has eight arenas per core, each with its own fragmentation. A lower mmap threshold would cost page faults in every step.
"""
PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN compiles a GEMM kernel of 0.2 MiB per number of rows, and keeps the latest 1024; torch has another cache of as many.

Recompiling one takes 0.6 ms.
"""
TRIM_SECONDS = 10.0
"""How often free memory is returned to the system, which takes a few ms. Steps of different sizes keep touching new memory."""


def bound_kept_memory() -> None:
    """Set the limits that the environment does not set, and start returning free memory periodically.

    Each step has different shapes, so without the limits the process would grow for hours. With a C library other than glibc only the
    limits of kernels take effect. Call it before torch is loaded and before other threads start.
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
    """Return free memory to the system once; does nothing with a C library other than glibc."""
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
    """Call malloc_trim periodically; it runs without the GIL."""
    pause = threading.Event()
    while not pause.wait(TRIM_SECONDS):
        trim(0)
