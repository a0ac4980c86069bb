"""Launchers of kernels that threads compile side by side are made one at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from runtime.layers.kernels.triton_launchers import one_at_a_time


class Maker:
    """Makes launchers as Triton does: into one place, where they are found a moment later."""

    def __init__(self) -> None:
        self.place: object = None
        self.switch = threading.Event()

    def __call__(self, source: object, metadata: object) -> object:
        if source == "bad":
            raise RuntimeError("no such launcher")
        self.place = source
        self.switch.wait(0.01)
        return self.place, metadata


def test_a_launcher_is_never_that_of_another_thread() -> None:
    driver = SimpleNamespace(launcher_cls=(make := Maker()))
    with one_at_a_time(driver), ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: driver.launcher_cls(i, -i), range(8)))
    assert made == [(i, -i) for i in range(8)]
    assert driver.launcher_cls is make, "the driver is as it was"


def test_a_launcher_that_cannot_be_made_holds_nobody_up() -> None:
    driver = SimpleNamespace(launcher_cls=(make := Maker()))
    with one_at_a_time(driver):
        with pytest.raises(RuntimeError, match="no such launcher"):
            driver.launcher_cls("bad", 0)
        assert driver.launcher_cls(2, 2) == (2, 2), "the lock is free again"
    with pytest.raises(ZeroDivisionError), one_at_a_time(driver):
        _ = 1 / 0
    assert driver.launcher_cls is make, "the driver is as it was"
