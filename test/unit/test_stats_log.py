"""The log line describes the steps since the previous line."""

from __future__ import annotations

import pytest

from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.stats_log import LOG_PERIOD, StatsLog


class Logged:
    """Statistics, and the log that reads them."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.stats = SchedulerStats(num_running_reqs=3, num_queue_reqs=1, pages_total=4, pages_free=3)
        self.log = StatsLog(lambda: self.stats, 0.0)
        self.caplog = caplog

    def decode(self, accept_lens: list[int], padded_size: int, graph: bool) -> None:
        live = len(accept_lens)
        self.stats.decode.add(graph, live, max(0, padded_size - live))
        for length in accept_lens:
            self.stats.spec_by_context["0"].add(length, 3, 4)

    def line(self, turn: int) -> str:
        self.caplog.clear()
        with self.caplog.at_level("INFO"):
            self.log.tick(turn * LOG_PERIOD)
        return self.caplog.text


def test_the_log_shows_acceptance_and_graph_hits_since_the_previous_line(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog)
    logged.decode([4, 2, 1, 1], 4, graph=True)
    first = logged.line(1)
    assert "accept len: 2.00, accepted by position: 0.50 0.25 0.25, accepted/drafted: 4/12, graph hits: 1.00, padding: 0.00" in first
    assert "#running-req: 3, token usage: 0.25" in first
    logged.decode([2, 2, 2], 4, graph=True)
    logged.decode([4], 1, graph=False)
    second = logged.line(2)
    assert "accept len: 2.50, accepted by position: 1.00 0.25 0.25, accepted/drafted: 6/12, graph hits: 0.50, padding: 0.20" in second
    assert not logged.line(3), "no step ran"


def test_several_depths_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog)
    logged.decode([2], 1, graph=True)
    logged.stats.spec_depth_steps_total = {"3": 1}
    assert "steps by depth" not in logged.line(1)
    logged.decode([2], 1, graph=True)
    logged.stats.spec_depth_steps_total = {"3": 4, "0": 2, "1": 0}
    assert "steps by depth: 0:2 3:3," in logged.line(2)


def test_without_drafts_and_decode_steps_the_log_omits_them(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog)
    logged.stats.extend_steps += 1
    text = logged.line(1)
    assert "gen throughput" in text
    assert "accept" not in text
    assert "graph hits" not in text
    logged.stats.decode.add(False, 0, 0)
    assert "graph hits: 0.00, padding: 0.00" in logged.line(2)


def test_idle_time_does_not_lower_the_rates_of_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog)
    assert not any(logged.line(turn) for turn in range(1, 100)), "the server is idle"
    logged.decode([1], 1, graph=True)
    logged.stats.generation_tokens_total = 50
    assert f"gen throughput (token/s): {50 / LOG_PERIOD:.2f}," in logged.line(100)


def test_the_generation_rate_is_renewed_each_second(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog)
    logged.stats.generation_tokens_total = 50
    logged.log.tick(0.5)
    assert logged.stats.gen_throughput == 0.0
    logged.log.tick(2.0)
    assert logged.stats.gen_throughput == 25.0
