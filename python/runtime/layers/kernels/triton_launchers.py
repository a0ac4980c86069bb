"""Compile Triton kernels in threads safely: launchers are made one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Driver(Protocol):
    """The part of `triton.runtime.driver.active` used here."""

    launcher_cls: Callable[[object, object], object]


@contextmanager
def one_at_a_time(driver: Driver) -> Iterator[None]:
    """Within this context, no two threads make the launcher of a kernel at once.

    Triton loads each launcher as an extension module, all under one name. CPython finds such a module again by its
    name: a launcher that one thread loads for a second kernel is written into the module that another thread has just
    made, which then launches its kernel with the other's arguments. Source: `compile_module_from_src` of triton 3.6;
    `import_find_extension` of CPython 3.10 to 3.12.
    """
    make, lock = driver.launcher_cls, threading.Lock()

    def locked(source: object, metadata: object) -> object:
        with lock:
            return make(source, metadata)

    driver.launcher_cls = locked
    try:
        yield
    finally:
        driver.launcher_cls = make
