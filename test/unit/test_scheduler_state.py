"""The log line tells what happened since the one before it."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.batch import ScheduleBatch, StepStats
from runtime.managers.telemetry.scheduler_stats import LOG_PERIOD, Gauges, SchedulerState

GAUGES = Gauges(num_running_reqs=3, num_queue_reqs=1, pages_used=1, pages_total=4, pages_free=3, tokens_used=16, max_total_num_tokens=64)


def decode(state: SchedulerState, accept_lens: list[int], padded_size: int, graph: bool) -> None:
    none = np.full(len(accept_lens), -1, dtype=np.int32)
    batch = ScheduleBatch(0, np.arange(1, len(none) + 1, dtype=np.int32), none, none)
    state.step_done(batch, StepStats(graph=graph, padded_size=padded_size, draft_tokens=3), ())
    for length in accept_lens:
        state.spec.add(length, 3, 4)


def line(state: SchedulerState, turn: int, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level("INFO"):
        state.tick(turn * LOG_PERIOD, GAUGES)
    return caplog.text


def test_the_log_tells_acceptance_and_graphs_since_the_line_before(caplog: pytest.LogCaptureFixture) -> None:
    state = SchedulerState(0.0)
    decode(state, [4, 2, 1, 1], 4, graph=True)
    first = line(state, 1, caplog)
    assert "accept len: 2.00, accepted by position: 0.50 0.25 0.25, accepted/drafted: 4/12, graph hits: 1.00, padding: 0.00" in first
    decode(state, [2, 2, 2], 4, graph=True)
    decode(state, [4], 1, graph=False)
    second = line(state, 2, caplog)
    assert "accept len: 2.50, accepted by position: 1.00 0.25 0.25, accepted/drafted: 6/12, graph hits: 0.50, padding: 0.20" in second
    assert not line(state, 3, caplog), "nothing happened"


def test_without_drafts_and_decode_steps_the_log_is_silent_about_them(caplog: pytest.LogCaptureFixture) -> None:
    state = SchedulerState(0.0)
    state.extend_steps += 1
    text = line(state, 1, caplog)
    assert "gen throughput" in text
    assert "accept" not in text
    assert "graph hits" not in text
    state.decode.add(False, 0, 0)
    assert "graph hits: 0.00, padding: 0.00" in line(state, 2, caplog)
