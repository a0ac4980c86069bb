"""A kernel that only waits, to time the next kernel after one that leaves the memory idle."""

from __future__ import annotations

import ctypes
from functools import cache

from runtime.layers.kernels import cuda_driver

SOURCE = """
extern "C" __global__ void pause(long long cycles) {
    asm volatile("griddepcontrol.wait;\\ngriddepcontrol.launch_dependents;" ::: "memory");
    const long long start = clock64();
    while (clock64() - start < cycles) asm volatile("nanosleep.u32 100;");
}
"""
PAUSE_CYCLES = 10_000
"""Five to six microseconds on Hopper: approximately the time of attention over a thousand keys."""


def pause(pdl: bool) -> None:
    """Wait for the preceding kernel, trigger the next launch, and end after `PAUSE_CYCLES`."""
    _kernel()(1, (ctypes.c_longlong(PAUSE_CYCLES),), pdl)


@cache
def _kernel() -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(SOURCE, "pause", threads=32)
