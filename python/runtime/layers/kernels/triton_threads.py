"""Makes it safe to compile Triton kernels in several threads: each kernel in only one thread, and launchers loaded one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Protocol

from runtime.layers.kernels.once import Once


class Build(Protocol):
    """The part of `triton.runtime.build` used here."""

    _load_module_from_path: Callable[[str, str], Any]


@contextmanager
def launchers_apart(build: Build) -> Iterator[None]:
    """Within this context, threads load the launchers of kernels one at a time; they still compile launchers in parallel.

    Triton loads all launchers as extension modules of one name, and CPython reuses a module by its name: a launcher that one thread loads
    would overwrite the module that another thread has just created, which would then launch its kernel with the wrong arguments. Each
    launcher therefore gets its own copy of the module's names.
    Source: `compile_module_from_src` of triton 3.6 and 3.7; `import_find_extension` of CPython 3.10 to 3.12.
    """
    load, lock = build._load_module_from_path, threading.Lock()

    def load_alone(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextmanager
def kernels_once(function: Any, compiled: Any, too_large: type[Exception]) -> Iterator[None]:
    """Within this context, threads that need the same kernel wait for one of them to compile and load it.

    Otherwise each of them would compile it, and one thread could launch a kernel that another has compiled but not loaded yet. Source:
    `JITFunction._do_compile` and `CompiledKernel._init_handles` of triton 3.6 and 3.7.

    Args:
        function: the class `triton.runtime.jit.JITFunction`.
        compiled: the class `triton.compiler.compiler.CompiledKernel`.
        too_large: the exception raised if a kernel exceeds the GPU's resources, also by its launches.
    """
    compile_, create, kernels = function._do_compile, compiled.__init__, Once[object]()

    def compile_once(self: object, key: str, *args: object, **kwargs: object) -> object:
        return kernels.get((id(self), key), lambda: compile_(self, key, *args, **kwargs))

    def create_loaded(self: Any, *args: object, **kwargs: object) -> None:
        create(self, *args, **kwargs)
        with suppress(too_large):
            _ = self.run  # a property, which loads the kernel

    function._do_compile, compiled.__init__ = compile_once, create_loaded
    try:
        yield
    finally:
        function._do_compile, compiled.__init__ = compile_, create
