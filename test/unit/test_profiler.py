"""The owner of the trace: one at a time, written where asked, and never stuck."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from runtime.errors import ServingError, WrongProfile
from runtime.model_executor.profiler import Profiler


def test_a_trace_holds_the_phases_between_start_and_stop(tmp_path: Path) -> None:
    profiler = Profiler(torch.device("cpu"))
    with profiler.span("before"):
        torch.ones(3).sum()
    profiler.start(str(tmp_path / "new"))
    with pytest.raises(WrongProfile, match="already running"):
        profiler.start(str(tmp_path))
    with profiler.span("phase"):
        torch.ones(3).sum()
    file = Path(profiler.stop())
    assert file.parent == tmp_path / "new"
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"talon::phase", "talon::before"} & names == {"talon::phase"}
    with pytest.raises(WrongProfile, match="No profile is running"):
        profiler.stop()


def test_a_folder_that_cannot_be_made_is_named_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = Profiler(torch.device("cpu"))
    with pytest.raises(ServingError, match=r"Cannot create the profile folder .*file/traces: Not a directory"):
        profiler.start(str(tmp_path / "file" / "traces"))
    profiler.start(str(tmp_path))
    profiler.stop()


def test_a_trace_that_cannot_be_written_is_over_all_the_same(tmp_path: Path) -> None:
    profiler = Profiler(torch.device("cpu"))
    profiler.start(str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    with pytest.raises(OSError, match="gone"):
        profiler.stop()
    profiler.start(str(tmp_path))
    assert Path(profiler.stop()).is_file()


def test_traces_of_one_second_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = time.time_ns() // 10**9
    monkeypatch.setattr(time, "time", lambda: float(second))
    profiler = Profiler(torch.device("cpu"))
    files = set[str]()
    for _ in range(2):
        profiler.start(str(tmp_path))
        files.add(profiler.stop())
    assert len(files) == 2
