"""Acceptance is counted as its definition says, and drift is told from chance."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from runtime.model_executor.acceptance import AcceptanceCounters, DriftAlarm, compare, side_by_side
from runtime.worker_info import AcceptanceCounts


def draw_lens(rng: np.random.Generator, rates: tuple[float, ...], count: int) -> np.ndarray:
    hits = rng.random((count, len(rates))) < np.array(rates)
    return 1 + hits.cumprod(axis=1).sum(axis=1)


def test_counters_follow_the_definition_at_any_depth() -> None:
    rng = np.random.default_rng(0)
    counters = AcceptanceCounters(4)
    drafted, reached, accepted, total, windows = [0] * 4, [0] * 4, [0] * 4, 0, 0
    for depth in (4, 0, 2, 3, 4, 1):
        lens = rng.integers(1, depth + 2, size=17)
        counters.add(lens.astype(np.int32), depth)
        for length in lens.tolist():
            windows, total = windows + 1, total + length
            for position in range(depth):
                drafted[position] += 1
                reached[position] += length >= position + 1
                accepted[position] += length >= position + 2
    shown = counters.stats()
    assert (shown.drafted, shown.reached, shown.accepted) == (drafted, reached, accepted)
    assert shown.iterations == windows
    assert shown.drafted_tokens == sum(drafted)
    assert counters.mean_accept_len == pytest.approx(total / windows)
    assert shown.rates == pytest.approx([a / r for a, r in zip(accepted, reached, strict=True)])
    assert msgspec.json.decode(msgspec.json.encode(shown), type=AcceptanceCounts) == shown


def test_merging_is_counting_together() -> None:
    parts = [AcceptanceCounters(3), AcceptanceCounters(3)]
    whole = AcceptanceCounters(3)
    for part, lens in zip(parts, ([1, 2, 4], [4, 4, 3, 1]), strict=True):
        part.add(lens)
        whole.add(lens)
    parts[0].merge(parts[1])
    assert parts[0] == whole
    assert parts[1] != whole


def test_nothing_counted_is_one_token_per_iteration() -> None:
    empty = AcceptanceCounters(0)
    empty.add([1, 1])
    assert empty.mean_accept_len == AcceptanceCounters(3).mean_accept_len == 1.0


def test_the_alarm_names_the_position_that_drifted() -> None:
    rng = np.random.default_rng(1)
    alarm = DriftAlarm(3)
    for _ in range(200):
        alarm.add(draw_lens(rng, (0.8, 0.3, 0.6), 64), eager_sample=False)
        alarm.add(draw_lens(rng, (0.8, 0.7, 0.6), 8), eager_sample=True)
    drifts = alarm.check()
    assert [d.position for d in drifts] == [1]
    assert drifts[0].z < -5
    assert "draft 2:" in str(drifts[0])


def test_graphs_that_accept_more_than_eager_steps_drifted_too() -> None:
    alarm = DriftAlarm(1)
    alarm.add([2] * 9_000 + [1] * 1_000, eager_sample=False)
    alarm.add([2] * 800 + [1] * 200, eager_sample=True)
    (drift,) = alarm.check()
    assert drift.graph > drift.eager
    assert drift.z > 5


def test_less_than_two_hundredths_are_no_drift_however_sure() -> None:
    for rejected, alarms in ((150, 0), (250, 1)):
        alarm = DriftAlarm(1)
        alarm.add([2] * (10_000 - rejected) + [1] * rejected, eager_sample=False)
        alarm.add([2] * 1_999, eager_sample=True)
        assert compare(alarm.recent(False), alarm.recent(True))[0].z < -5
        assert len(alarm.check()) == alarms


def test_the_alarm_is_silent_on_chance_and_on_little() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        alarm = DriftAlarm(3)
        for _ in range(100):
            alarm.add(draw_lens(rng, (0.8, 0.7, 0.6), 64), eager_sample=False)
            alarm.add(draw_lens(rng, (0.8, 0.7, 0.6), 8), eager_sample=True)
        assert alarm.check() == []
    scarce = DriftAlarm(3)
    scarce.add([1] * 5000, eager_sample=False)
    scarce.add([4] * 299, eager_sample=True)
    assert scarce.check() == []
    scarce.add([4], eager_sample=True)
    assert [d.position for d in scarce.check()] == [0]


def test_the_alarm_forgets_what_is_long_past() -> None:
    alarm = DriftAlarm(1, window=1000)
    alarm.add([1] * 1000, eager_sample=False)
    alarm.add([2] * 400, eager_sample=True)
    assert alarm.check()
    for _ in range(4):
        alarm.add([2] * 1000, eager_sample=False)
        alarm.add([2] * 1000, eager_sample=True)
    assert alarm.check() == []
    assert alarm.recent(False).iterations <= 2000
    assert alarm.recent(True).iterations <= 2000


@pytest.mark.parametrize("batch", [1, 32])
def test_text_that_is_accepted_otherwise_from_some_time_on_is_no_drift(batch: int) -> None:
    """The sample is one step in 512: what both sides remember must be of the same time, and not only much of it."""
    rng, alarm = np.random.default_rng(3), DriftAlarm(2)
    steps = 3 * 2_000 // batch  # of the sample, for each kind of text: more than the alarm remembers
    for rates in ((0.8, 0.7), (0.5, 0.4), (0.9, 0.9)):
        for _ in range(steps):
            alarm.add(draw_lens(rng, rates, 511 * batch), eager_sample=False)
            alarm.add(draw_lens(rng, rates, batch), eager_sample=True)
            assert alarm.check() == []


def test_graphs_that_go_wrong_later_are_noticed_too() -> None:
    rng, alarm = np.random.default_rng(4), DriftAlarm(2)
    for graph in ((0.8, 0.7), (0.7, 0.7)):
        for _ in range(6_000 // 32):
            alarm.add(draw_lens(rng, graph, 511 * 32), eager_sample=False)
            alarm.add(draw_lens(rng, (0.8, 0.7), 32), eager_sample=True)
    assert [drift.position for drift in alarm.check()] == [0]


def test_identical_runs_compare_as_zero_and_print_without_marks() -> None:
    first, second = AcceptanceCounters(2), AcceptanceCounters(2)
    for counters in (first, second):
        counters.add([1, 2, 3, 3])
    assert [d.z for d in compare(first, second)] == [0.0, 0.0]
    table = side_by_side(first, second)
    assert "differs" not in table
    assert "3/4 0.7500" in table
    second.add([1])
    assert side_by_side(first, second).count("differs") == 1
