"""The watchdog: a silent process counts as hung, except a scheduler that writes a trace."""

from __future__ import annotations

import pytest

from runtime.entrypoints.child import Role
from runtime.entrypoints.watchdog import SHARDED_TICKS, SILENT_TICKS, TRACE_TICKS, Watchdog


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
