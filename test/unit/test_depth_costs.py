"""The measurement at start-up that the depth controller begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.batch import ScheduleBatch
from runtime.model_executor import depth_costs
from runtime.model_executor.depth_costs import ENOUGH, ScratchRows, without_delays
from runtime.model_executor.iteration_cost import CostPoint
from unit.predicting import speculating


class FakeWorker:
    """A worker whose iterations take the next of `seconds` each, on a clock of its own."""

    def __init__(self, seconds: list[float], overlap: bool, max_pages: int = 8) -> None:
        self.limits = SimpleNamespace(overlap=overlap, page_size=16, vocab_size=10, max_total_tokens=1 << 12)
        target = SimpleNamespace(page_table=SimpleNamespace(max_pages=max_pages))
        self.parts = SimpleNamespace(depths=self, verifier=SimpleNamespace(padded_size=lambda depth, size: size), target=target)
        self.pages = 0
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
        self.pages = max(self.pages, *batch.page_cols.tolist()) if self.steps == 1 else self.pages
        return SimpleNamespace(wait=lambda: setattr(self, "now", self.now + seconds))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        ([0.4, 0.005, 0.006, 0.005], 0.005),
        ([0.001, 0.006, 0.005, 0.006], 0.006),
        ([0.006, 0.011, 0.001, 0.006], 0.006),
        ([0.011, 0.001, 0.006, 0.006], 0.006),
        ([0.4, 0.3, 9.0], 0.3),
    ],
    ids=[
        "the first loads kernels",
        "the first waits for no draft",
        "the second is read late",
        "the first is read late",
        "slow ones run twice",
    ],
)
def test_the_first_iteration_at_a_depth_does_not_count(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], want: float, overlap: bool
) -> None:
    worker: Any = FakeWorker(seconds, overlap)
    monkeypatch.setattr(depth_costs.time, "perf_counter", worker.perf_counter)
    point = ScratchRows(worker, 2).time(3)
    assert (point.size, point.depth, point.seconds) == (2, 3, pytest.approx(want))
    assert worker.steps == 1 + (2 if min(seconds) > ENOUGH else 4)


def test_a_short_context_has_no_room_for_the_deepest() -> None:
    worker: Any = FakeWorker([0.1] * 9, overlap=False, max_pages=1)
    scratch = ScratchRows(worker, 2)
    assert worker.pages == 0, "the only page of each request"
    assert [depth for depth in (0, 1, 3, 5, 7) if scratch.has_room(depth)] == [0, 1]
    scratch.time(1)
    assert not scratch.has_room(1), "what was timed took its positions"


@pytest.mark.parametrize("page", [1, 4])
def test_the_measurement_stays_within_a_kv_cache_that_is_smaller_than_its_room(tmp_path: Path, page: int) -> None:
    runtime = {"context_length": 100, "max_total_tokens": 120, "page_size": page}
    worker = speculating(tmp_path, runtime=runtime, num_steps=7, depths=(7, 3, 0))
    pages = worker.parts.target.page_table.pages
    scratch = ScratchRows(worker, 1)
    assert pages.max().item() == 120 // page, "all that there are"
    assert scratch.has_room(7)
    scratch.time(7)


def test_a_delay_in_the_measurement_makes_no_depth_slower_than_deeper_ones() -> None:
    measured = [CostPoint(1, 0, 0.010), CostPoint(1, 1, 0.005), CostPoint(1, 3, 0.006), CostPoint(4, 0, 0.004), CostPoint(4, 3, 0.007)]
    assert [point.seconds for point in without_delays(measured)] == [0.005, 0.005, 0.006, 0.004, 0.007]


def test_the_shorter_of_two_times_of_a_size_and_depth_counts() -> None:
    measured = [CostPoint(1, 0, 0.004), CostPoint(1, 3, 0.006), CostPoint(1, 0, 0.0042), CostPoint(1, 3, 0.005)]
    assert without_delays(measured) == [CostPoint(1, 0, 0.004), CostPoint(1, 3, 0.005)]
