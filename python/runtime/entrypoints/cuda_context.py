"""Creates a process's CUDA context while its Python modules are still being imported."""

from __future__ import annotations

import ctypes
import threading


def create_early() -> threading.Thread:
    """Create the primary context of this process's GPU on another thread; torch uses the same one later.

    Both take seconds, and the driver needs no Python meanwhile. A machine without the driver, or a failure, changes
    nothing: torch reports it when it creates the context itself.
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
