"""The watchdog: a silent process counts as hung, except a scheduler that writes a trace."""

from __future__ import annotations

import pytest

from runtime.entrypoints.child import Role
from runtime.entrypoints.watchdog import SHARDED_TURNS, SILENT_TURNS, TRACE_TURNS, Watchdog


def turns_until_hung(silent: Role, trace_turns: int, patience: int = SILENT_TURNS) -> tuple[Role, int]:
    """Which process hangs and after how many turns, if `silent` never beats and a trace is written for `trace_turns` turns."""
    watchdog = Watchdog(("detokenizer", "scheduler"), patience)
    beats: dict[Role, int] = {"detokenizer": 0, "scheduler": 0}
    for turn in range(1, 1 << 16):
        for role in beats:
            beats[role] += role != silent
        hung = watchdog.turn(beats, writes_trace=turn <= trace_turns)
        if hung is not None:
            return hung, turn
    raise AssertionError("nothing hung")


@pytest.mark.parametrize("trace_turns", [0, 100])
def test_a_silent_scheduler_hangs_unless_it_writes_a_trace(trace_turns: int) -> None:
    # The first turn hears every process.
    assert turns_until_hung("scheduler", trace_turns) == ("scheduler", max(trace_turns, 1) + SILENT_TURNS)


def test_a_trace_excuses_only_the_scheduler_and_only_for_a_while() -> None:
    assert turns_until_hung("detokenizer", 100) == ("detokenizer", SILENT_TURNS + 1)
    assert turns_until_hung("scheduler", 1 << 30) == ("scheduler", TRACE_TURNS + SILENT_TURNS)


def test_patience_is_shorter_where_ranks_share_the_model() -> None:
    assert turns_until_hung("scheduler", 0, SHARDED_TURNS) == ("scheduler", SHARDED_TURNS + 1)
