"""The measurement at start-up that the depth controller begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.batch import ScheduleBatch
from runtime.speculative import depth_costs
from runtime.speculative.depth_costs import ENOUGH, ScratchRows


class FakeWorker:
    """A worker whose iterations take the next of `seconds` each, on a clock of its own."""

    def __init__(self, seconds: list[float], overlap: bool) -> None:
        self.limits = SimpleNamespace(overlap=overlap, page_size=16, vocab_size=10)
        self.parts = SimpleNamespace(depths=self, verifier=SimpleNamespace(padded_size=lambda depth, size: size))
        self.now, self.steps = 0.0, 0
        self._seconds = [0.0, *seconds]  # the prompt

    def perf_counter(self) -> float:
        return self.now

    @contextmanager
    def forced(self, depth: int) -> Iterator[None]:
        yield

    def submit(self, batch: ScheduleBatch) -> Any:
        seconds = self._seconds.pop(0)
        self.steps += 1
        return SimpleNamespace(wait=lambda: setattr(self, "now", self.now + seconds))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("seconds", "want"),
    [([0.4, 0.005, 0.006], 0.005), ([0.001, 0.006, 0.005], 0.005), ([0.4, 0.3, 9.0], 0.3)],
    ids=["the first loads kernels", "the first waits for no draft", "slow ones run twice"],
)
def test_the_first_iteration_at_a_depth_does_not_count(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], want: float, overlap: bool
) -> None:
    worker: Any = FakeWorker(seconds, overlap)
    monkeypatch.setattr(depth_costs.time, "perf_counter", worker.perf_counter)
    point = ScratchRows(worker, 2).time(3)
    assert (point.size, point.depth, point.seconds) == (2, 3, pytest.approx(want))
    assert worker.steps == 1 + (2 if seconds[0] > ENOUGH else 3)
