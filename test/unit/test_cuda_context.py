"""The CUDA context that a process creates early."""

from __future__ import annotations

import ctypes

import pytest

from runtime.entrypoints import cuda_context


class Driver:
    """A CUDA driver that records its calls; `cuInit` returns `status`."""

    def __init__(self, status: int) -> None:
        self.status, self.calls = status, list[str]()

    def __getattr__(self, name: str):
        def call(*_: object) -> int:
            self.calls.append(name)
            return self.status

        return call


@pytest.mark.parametrize(("status", "calls"), [(0, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), (100, ["cuInit"])])
def test_the_context_is_retained_where_the_driver_works(monkeypatch: pytest.MonkeyPatch, status: int, calls: list[str]) -> None:
    driver = Driver(status)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    cuda_context.create_early().join(10)
    assert driver.calls == calls


def test_a_machine_without_the_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    thread = cuda_context.create_early()
    thread.join(10)
    assert not thread.is_alive()
