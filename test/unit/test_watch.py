"""The watchdog: a silent process counts as hung, except a scheduler that writes a trace. All of them count periods, not seconds."""

from __future__ import annotations

import threading
import time

import pytest

from runtime.entrypoints.child import Role
from runtime.entrypoints.watchdog import SHARDED_TICKS, SILENT_TICKS, TRACE_TICKS, Watchdog
from runtime.managers.telemetry import heartbeat
from runtime.managers.telemetry.heartbeat import HeartbeatThread
from runtime.model_executor.followers import StepWait


def ticks_until_hung(silent: Role, trace_ticks: int, patience: int = SILENT_TICKS) -> tuple[Role, int]:
    """Which process hangs and after how many ticks, if `silent` never beats and a trace is written for `trace_ticks` ticks."""
    watchdog = Watchdog(("detokenizer", "scheduler"), patience)
    beats: dict[Role, int] = {"detokenizer": 0, "scheduler": 0}
    for tick in range(1, 1 << 16):
        for role in beats:
            beats[role] += role != silent
        hung = watchdog.tick(beats, writes_trace=tick <= trace_ticks)
        if hung is not None:
            return hung, tick
    raise AssertionError("nothing hung")


@pytest.mark.parametrize("trace_ticks", [0, 100])
def test_a_silent_scheduler_hangs_unless_it_writes_a_trace(trace_ticks: int) -> None:
    # The first tick hears every process.
    assert ticks_until_hung("scheduler", trace_ticks) == ("scheduler", max(trace_ticks, 1) + SILENT_TICKS)


def test_a_trace_excuses_only_the_scheduler_and_only_for_a_while() -> None:
    assert ticks_until_hung("detokenizer", 100) == ("detokenizer", SILENT_TICKS + 1)
    assert ticks_until_hung("scheduler", 1 << 30) == ("scheduler", TRACE_TICKS + SILENT_TICKS)


def test_patience_is_shorter_where_ranks_share_the_model() -> None:
    assert ticks_until_hung("scheduler", 0, SHARDED_TICKS) == ("scheduler", SHARDED_TICKS + 1)


def test_a_step_is_late_after_so_many_periods_however_long_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = StepWait("start")
    with wait.of(7):
        assert wait.longer_than(3) == ""
        monkeypatch.setattr(time, "monotonic", lambda: 1e9)  # a suspended machine
        assert [wait.longer_than(3) for _ in range(2)] == ["", ""]
        assert wait.longer_than(3) == "step 7 does not start: rank 0 has waited 1.5 s for it"
    for step in range(8, 20):
        with wait.of(step):
            assert wait.longer_than(3) == ""


def test_the_heartbeat_stops_while_the_loop_does_not_begin_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD", 0.01)
    iterations, beats, beaten = [0], [0], threading.Event()

    def beat() -> None:
        beats[0] += 1
        beaten.set()

    with HeartbeatThread(beat, lambda: iterations[0], stall=0.03):
        time.sleep(0.3)
        before = beats[0]
        assert 1 <= before <= 5
        beaten.clear()
        iterations[0] += 1
        assert beaten.wait(10.0)


def test_the_heartbeat_goes_on_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD", 0.01)
    beaten = threading.Semaphore(0)
    with HeartbeatThread(beaten.release, lambda: 0, stall=10.0):
        assert beaten.acquire(timeout=10.0)
        monkeypatch.setattr(time, "monotonic", lambda: 1e9)
        assert all(beaten.acquire(timeout=10.0) for _ in range(5))
