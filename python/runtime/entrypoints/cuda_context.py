"""Creates a process's CUDA context while its Python modules are still being imported."""

from __future__ import annotations

import ctypes
import threading


def create_early() -> threading.Thread:
    """Create the primary context of this process's GPU in a thread; torch uses the same context later.

    Imports and context creation take seconds each, and the driver does not hold the GIL, so they overlap. Errors are ignored here: torch
    reports them when it creates the context itself.
    """

    def create() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    thread = threading.Thread(target=create, name="cuda-context", daemon=True)
    thread.start()
    return thread
