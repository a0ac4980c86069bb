"""What the start leaves is not collected again while requests run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.entrypoints import child
from runtime.entrypoints.collector import spare_start


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_objects_of_the_start_are_spared_and_later_ones_are_not() -> None:
    ring: list[Any] = []
    ring.append(ring)
    here = id(ring)
    spare_start()
    assert gc.get_freeze_count() > 0
    assert all(id(known) != here for known in gc.get_objects()), "the collector still looks at it"
    later: list[Any] = []
    assert any(known is later for known in gc.get_objects())


def test_a_scheduler_spares_its_start_before_it_says_that_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    scheduler = SimpleNamespace(run=lambda: said.append("runs"))
    worker = SimpleNamespace(limits=None, close=lambda: said.append("closes"))
    monkeypatch.setattr("runtime.managers.scheduler.Scheduler", lambda *_: scheduler)
    monkeypatch.setattr("runtime.models.hf_config.load_hf_config", lambda _: SimpleNamespace(eos_ids=()))
    monkeypatch.setattr(child, "tokenizer_eos_ids", lambda _: ())
    model = SimpleNamespace(model_path="", tokenizer_path="")
    orders: Any = SimpleNamespace(folder=str(tmp_path), config=SimpleNamespace(model=model, scheduler=None, cache=None))
    reporter: Any = SimpleNamespace(send=lambda _: said.append(f"ready, {'spared' if gc.get_freeze_count() else 'not spared'}"))
    child.serve_scheduler(orders, reporter, lambda *_: worker)  # type: ignore[arg-type, return-value]
    assert said == ["ready, spared", "runs", "closes"]
