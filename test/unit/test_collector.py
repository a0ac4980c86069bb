"""Objects of the start are frozen before requests run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.entrypoints import child
from runtime.entrypoints.kept_memory import freeze_gc


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def test_freezing_excludes_present_objects_and_no_later_ones() -> None:
    ring: list[Any] = []
    ring.append(ring)
    here = id(ring)
    freeze_gc()
    assert gc.get_freeze_count() > 0
    assert all(id(known) != here for known in gc.get_objects()), "the collector still visits it"
    later: list[Any] = []
    assert any(known is later for known in gc.get_objects())


def test_a_scheduler_freezes_its_objects_before_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    scheduler = SimpleNamespace(run=lambda: said.append("runs"))
    worker = SimpleNamespace(limits=None, close=lambda: said.append("closes"))
    monkeypatch.setattr("runtime.managers.scheduler.Scheduler", lambda *_, **__: scheduler)
    monkeypatch.setattr("runtime.models.registry.load_hf_config", lambda _: SimpleNamespace(eos_ids=()))
    monkeypatch.setattr(child, "eos_ids_of", lambda *_: ())
    monkeypatch.setattr(child, "make_compiler", lambda *_: None)
    config: Any = SimpleNamespace(
        folder=str(tmp_path),
        config=SimpleNamespace(
            model=SimpleNamespace(model_path="", tokenizer_path=""), device=SimpleNamespace(device="cpu"), scheduler=None, cache=None
        ),
    )

    def report(_: object) -> None:
        said.append(f"ready, {'frozen' if gc.get_freeze_count() else 'not frozen'}")

    child.serve_scheduler(config, report, lambda *_: worker)  # type: ignore[arg-type, return-value]
    assert said == ["ready, frozen", "runs", "closes"]
