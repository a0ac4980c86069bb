"""The drift alarm tells a fall of acceptance through graphs from chance, early, and from text that is harder to draft."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark.drift_alarm import extra_seconds, replay_seconds

from runtime.batch import NO_SAMPLE, EagerSample
from runtime.model_executor.drift_alarm import EAGER_GAIN, FORGET_PAIRS, GRAPH_GAIN, DriftAlarm, Pairs
from runtime.model_executor.sample_schedule import DRAFTS, EASY_SHARE, STRONG, WHOLE, Samples, SampleSchedule

RATES = (0.39, 0.45, 0.5)
FAULTY = (0.04, 0.45, 0.5)


def hits(rng: np.random.Generator, rates: Sequence[float], count: int) -> np.ndarray:
    return (rng.random((count, len(rates))) < np.array(rates)).cumprod(axis=1).sum(axis=1)


def pairs_of(rng: np.random.Generator, graph: Sequence[float], eager: Sequence[float], count: int, verify: bool = False) -> Pairs:
    """Both sides by the same chance, so that they are equal where their rates are, as without a fault."""
    chance = rng.random((count, len(graph)))
    sides = [(chance < np.array(rates)).cumprod(axis=1).sum(axis=1) for rates in (graph, eager)]
    unlike = rng.random(count) < 2 * (eager[0] - graph[0])  # some of them wrong on both sides
    return Pairs(sides[0], np.minimum(sides[1], sides[0] + 1), unlike, len(graph), verify)


class Traffic:
    """Iterations of `batch` requests, sampled as the schedules say, through graphs that accept `graph` of the drafts.

    `in_verify`: the fault is in the graph of verification, which samples of the draft alone replay.
    """

    def __init__(self, batch: int, seed: int = 0, in_verify: bool = False) -> None:
        self.alarm, self.samples = DriftAlarm(3), Samples()
        self.extra = list[float]()  # of each iteration, in replays
        self._batch, self._rng, self._in_verify = batch, np.random.default_rng(seed), in_verify

    def run(self, count: int, graph: tuple[float, ...], eager: tuple[float, ...] = RATES) -> int | None:
        """The number of iterations until the alarm, or None."""
        replay = replay_seconds(self._batch)
        for i in range(1, count + 1):
            self.alarm.count_iteration()
            sample = self.samples.next(self.alarm)
            self.extra.append(extra_seconds(self._batch, sample) / replay)
            self.samples.observe(replay * (1 + self.extra[-1]), sample)
            if sample.taken:
                seen = eager if sample.verify or not self._in_verify else graph
                self.alarm.add(pairs_of(self._rng, graph, seen, self._batch, sample.verify))
                if self.alarm.check():
                    return i
        return None


def test_pairs_are_counted_up_to_the_first_draft_that_one_side_alone_has() -> None:
    pairs = Pairs(np.array([0, 0, 1, 2, 3]), np.array([0, 1, 1, 1, 3]), np.zeros(5, dtype=np.bool_), depth=3)
    both, graph, eager, alone = pairs.counts(4).tolist()
    assert both == [5, 3, 1, 0]
    assert graph == [3, 2, 1, 0]
    assert eager == [4, 1, 1, 0]
    assert alone == [1, 0, 0, 0]


def test_evidence_has_mean_one_where_both_sides_are_right_as_often() -> None:
    """The property that bounds false alarms."""
    assert (np.exp(EAGER_GAIN) + np.exp(GRAPH_GAIN)) / 2 == pytest.approx(np.ones(len(EAGER_GAIN)))


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 32, 64])
def test_an_error_in_the_draft_extend_slots_is_reported_within_two_hundred_iterations(batch: int) -> None:
    assert None not in [Traffic(batch, seed).run(200, FAULTY) for seed in range(15)]


@pytest.mark.parametrize("batch", [1, 2, 4, 16, 64])
def test_a_fall_of_five_points_is_reported_within_five_thousand_iterations(batch: int) -> None:
    assert None not in [Traffic(batch, seed).run(5_000, (0.34, *RATES[1:])) for seed in range(8)]


@pytest.mark.parametrize("batch", [8, 32])
def test_an_error_that_only_verification_shows_is_reported_too(batch: int) -> None:
    assert None not in [Traffic(batch, seed, in_verify=True).run(1_000, FAULTY) for seed in range(4)]


@pytest.mark.parametrize("batch", [1, 32])
def test_graphs_that_go_wrong_later_are_noticed_as_early(batch: int) -> None:
    traffic = Traffic(batch, seed=3)
    assert traffic.run(20_000, RATES) is None
    assert traffic.run(200, FAULTY) is not None


@pytest.mark.parametrize("batch", [1, 32])
def test_text_that_is_accepted_otherwise_from_some_time_on_is_no_drift(batch: int) -> None:
    traffic = Traffic(batch, seed=4)
    for rates in (RATES, (0.8, 0.7, 0.6), (0.1, 0.2, 0.1), RATES):
        assert traffic.run(3_000, rates, rates) is None


def test_differences_by_chance_are_no_drift() -> None:
    """However often both sides differ: here their drafts have nothing to do with each other."""
    rng, alarm = np.random.default_rng(2), DriftAlarm(3)
    for _ in range(4_000):
        alarm.count_iteration()
        graph, eager = (hits(rng, RATES, 16) for _ in range(2))
        first = np.minimum(graph, eager)
        alarm.add(Pairs(np.minimum(graph, first + 1), np.minimum(eager, first + 1), graph != eager, 3))
        assert alarm.check() == []


def test_the_alarm_names_the_position_that_drifted() -> None:
    rng, alarm = np.random.default_rng(1), DriftAlarm(3)
    for _ in range(200):
        alarm.count_iteration()
        alarm.add(pairs_of(rng, (0.8, 0.3, 0.6), (0.8, 0.7, 0.6), 8))
    (drift,) = alarm.check()
    assert drift.position == 1
    assert drift.z < -5
    assert (drift.graph, drift.eager) == (pytest.approx(0.3, abs=0.05), pytest.approx(0.7, abs=0.05))
    assert "draft 2:" in str(drift)


def test_graphs_that_accept_more_than_eager_drafts_are_no_drift() -> None:
    rng, alarm = np.random.default_rng(1), DriftAlarm(3)
    for _ in range(200):
        alarm.count_iteration()
        alarm.add(pairs_of(rng, RATES, FAULTY, 8))
    assert alarm.check() == []


@pytest.mark.parametrize(("lost", "drifted"), [(0.01, False), (0.05, True)])
def test_less_than_two_hundredths_are_no_drift_however_sure(lost: float, drifted: bool) -> None:
    rng, alarm = np.random.default_rng(3), DriftAlarm(1)
    for _ in range(400):
        alarm.count_iteration()
        alarm.add(pairs_of(rng, (0.9 - lost,), (0.9,), 64))
    assert bool(alarm.check()) == drifted


def test_a_drift_that_ends_is_forgotten() -> None:
    rng, alarm = np.random.default_rng(5), DriftAlarm(1)
    for _ in range(20):
        alarm.count_iteration()
        alarm.add(pairs_of(rng, (0.1,), (0.6,), 8))
    assert alarm.check()
    for _ in range(FORGET_PAIRS // 8 + 1):
        alarm.add(pairs_of(rng, (0.6,), (0.6,), 8))
    assert alarm.check() == []
    assert alarm.suspicion(verify=False) == 0


def test_samples_with_and_without_verification_are_compared_apart() -> None:
    rng, alarm = np.random.default_rng(5), DriftAlarm(1)
    for _ in range(2):
        alarm.count_iteration()
        alarm.add(pairs_of(rng, (0.4,), (0.4,), 8))
        alarm.add(pairs_of(rng, (0.2,), (0.4,), 8, verify=True))
    assert alarm.suspicion(verify=False) == 0 < alarm.suspicion(verify=True)


def test_a_worker_without_drafts_has_no_alarm() -> None:
    alarm = DriftAlarm(0)
    assert alarm.check() == []
    assert alarm.suspicion(verify=False) == 0


@pytest.mark.parametrize("kind", [DRAFTS, WHOLE])
def test_samples_are_rare_without_suspicion_and_frequent_with_it(kind: object) -> None:
    schedule = SampleSchedule(DRAFTS if kind is DRAFTS else WHOLE)
    assert not any(schedule.next(0.0) for _ in range(schedule._kind.first - 1))
    assert schedule.next(0.0), "one early"
    taken = np.mean([schedule.next(0.0) for _ in range(40_000)])
    assert taken == pytest.approx(schedule._kind.share / schedule._kind.extra, rel=0.1)
    assert np.mean([schedule.next(3.0) for _ in range(20)]) > 0.9


def longest(extra: Sequence[float], window: int) -> float:
    """The most time that samples add to a stretch of `window`, in replays."""
    return float(np.convolve(extra, np.ones(window), "valid").max())


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize(("suspicion", "share"), [(12.0, 1.0), (STRONG - 0.1, EASY_SHARE)])
def test_samples_add_bounded_time_to_any_stretch_of_iterations(batch: int, suspicion: float, share: float) -> None:
    """However long it looks suspicious. The first samples are planned before any was timed."""
    traffic = Traffic(batch)
    still = {"suspicion": lambda verify: suspicion, "add": lambda pairs: None, "check": lambda: [], "count_iteration": lambda: None}
    traffic.alarm = SimpleNamespace(**still)  # type: ignore[assignment]
    traffic.run(6_000, RATES)
    reserve, refill = share * (WHOLE.reserve + DRAFTS.reserve), WHOLE.refill + DRAFTS.refill
    for window in (100, 700, 3_000):
        assert longest(traffic.extra, window) <= 1.05 * (reserve + refill * window)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
def test_samples_of_healthy_graphs_add_less_than_one_percent(batch: int) -> None:
    """To short runs from the start, in which speculation must pay, and to long ones."""
    short, long = [Traffic(batch, seed) for seed in range(4)], Traffic(batch, seed=9)
    for traffic in short:
        assert traffic.run(250, RATES) is None
    assert long.run(12_000, RATES) is None
    assert sum(sum(traffic.extra) for traffic in short) < 0.01 * 4 * 250
    assert sum(long.extra) < 0.01 * 12_000


def test_the_time_of_samples_decides_how_many_there_are() -> None:
    def samples(extra: float) -> int:
        schedule, count = SampleSchedule(DRAFTS), 0
        for _ in range(30_000):
            taken = schedule.next(0.0)
            schedule.observe(0.005 * (1 + extra * taken), taken)
            count += taken
        return count

    assert samples(0.1) > 2 * samples(0.3) > 3 * samples(1.0) > 0


def test_an_alarm_that_was_reported_asks_for_no_more_samples() -> None:
    rng, alarm = np.random.default_rng(1), DriftAlarm(3)
    while not alarm.check():
        alarm.count_iteration()
        alarm.add(pairs_of(rng, FAULTY, RATES, 8))
    assert alarm.suspicion(verify=False) == 0


def test_samples_with_verification_come_before_those_without() -> None:
    samples, alarm = Samples(), DriftAlarm(3)
    kinds = [samples.next(alarm) for _ in range(4_000)]
    assert {EagerSample(taken=True), EagerSample(taken=True, verify=True), NO_SAMPLE} == set(kinds)
    assert sum(sample.verify for sample in kinds) == 2
