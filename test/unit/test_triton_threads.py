"""Threads that compile Triton kernels share them, and get the launchers that they asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from runtime.layers.kernels.triton_threads import kernels_once, launchers_apart


class Loader:
    """Loads launchers as CPython does: all into one module, whose names change a moment later."""

    def __init__(self) -> None:
        self.module = SimpleNamespace(launch="")
        self.switch = threading.Event()

    def __call__(self, name: str, path: str) -> SimpleNamespace:
        if path == "bad":
            raise ImportError("no such launcher")
        self.module.launch = path
        self.switch.wait(0.01)
        return self.module


class TooLarge(Exception):
    """The kernel does not fit."""


def make_triton() -> tuple[type, type, list[str]]:
    """Classes that compile and load as Triton's do, and what they have done."""
    done: list[str] = []

    class Compiled:
        def __init__(self, key: str) -> None:
            self.key, self.function = key, None

        @property
        def run(self) -> str:
            if self.function is None:
                done.append(f"load {self.key}")
                if self.key == "large":
                    raise TooLarge
                self.function = self.key
            return self.key

    class Function:
        def __init__(self) -> None:
            self.kernels: dict[str, Compiled] = {}

        def _do_compile(self, key: str, warmup: bool = False) -> Compiled:
            done.append(f"compile {key}")
            if key == "bad":
                raise ValueError("does not compile")
            threading.Event().wait(0.01)
            self.kernels[key] = Compiled(key)
            return self.kernels[key]

    return Function, Compiled, done


def test_a_launcher_is_never_that_of_another_thread() -> None:
    build = SimpleNamespace(_load_module_from_path=(load := Loader()))
    with launchers_apart(build), ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda i: build._load_module_from_path("launcher", str(i)), range(8)))
    assert [module.launch for module in loaded] == [str(i) for i in range(8)]
    assert build._load_module_from_path is load, "Triton is as it was"


def test_a_launcher_that_cannot_be_loaded_blocks_no_other() -> None:
    build = SimpleNamespace(_load_module_from_path=(load := Loader()))
    with launchers_apart(build):
        with pytest.raises(ImportError, match="no such launcher"):
            build._load_module_from_path("launcher", "bad")
        assert build._load_module_from_path("launcher", "2").launch == "2", "the lock is free again"
    with pytest.raises(ZeroDivisionError), launchers_apart(build):
        _ = 1 / 0
    assert build._load_module_from_path is load, "Triton is as it was"


def test_threads_share_the_kernel_that_one_of_them_compiles_and_loads() -> None:
    function, compiled, done = make_triton()
    first, second = function(), function()
    compile_, create = function._do_compile, compiled.__init__
    with kernels_once(function, compiled, TooLarge), ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda i: (first, second)[i % 2]._do_compile("k"), range(16)))
    assert sorted(done) == ["compile k", "compile k", "load k", "load k"], "once for each of the two functions"
    assert {id(kernel) for kernel in kernels} == {id(first.kernels["k"]), id(second.kernels["k"])}
    assert all(kernel.function == "k" for kernel in kernels), "another thread may launch it at once"
    assert (function._do_compile, compiled.__init__) == (compile_, create), "Triton is as it was"


def test_a_kernel_that_does_not_fit_fails_when_it_is_launched() -> None:
    function, compiled, done = make_triton()
    with kernels_once(function, compiled, TooLarge):
        kernel = function()._do_compile("large", warmup=True)
        with pytest.raises(TooLarge):
            _ = kernel.run
    assert done[:2] == ["compile large", "load large"]


def test_a_kernel_that_does_not_compile_fails_in_each_thread() -> None:
    function, compiled, done = make_triton()
    one = function()
    with kernels_once(function, compiled, TooLarge):
        for _ in range(2):
            with pytest.raises(ValueError, match="does not compile"):
                one._do_compile("bad")
    assert done == ["compile bad", "compile bad"]
