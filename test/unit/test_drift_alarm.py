"""The drift alarm tells a fall of acceptance through graphs from chance, early, and from text that is harder to draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.batch import NO_SAMPLE, EagerSample
from runtime.model_executor.acceptance_monitor import AcceptanceMonitor
from runtime.model_executor.drift_alarm import EAGER_GAIN, FORGET_PAIRS, GRAPH_GAIN, DriftAlarm, Pairs
from runtime.model_executor.eager_drafts import first_of_equal
from runtime.model_executor.mismatch_detector import MismatchDetector
from runtime.model_executor.sample_schedule import DRAFTS, GROWTH, VERIFY, SampleKind, SampleSchedule, SampleSchedules
from runtime.sampling_params import SamplingParams
from unit.driver import Driver, EveryNth
from unit.predicting import plain, speculating

RATES = (0.39, 0.45, 0.5)
FAULTY = (0.04, 0.45, 0.5)
Windows = Callable[[np.random.Generator, int, bool], Pairs]
"""Draws pairs of so many requests, verified eagerly or not."""


def hits(rng: np.random.Generator, rates: Sequence[float], count: int) -> np.ndarray:
    return (rng.random((count, len(rates))) < np.array(rates)).cumprod(axis=1).sum(axis=1)


def pairs_of(rng: np.random.Generator, graph: Sequence[float], eager: Sequence[float], count: int, verify: bool = False) -> Pairs:
    """Both sides by the same chance, so that they are equal where their rates are, as without a fault."""
    chance = rng.random((count, len(graph)))
    sides = [(chance < np.array(rates)).cumprod(axis=1).sum(axis=1) for rates in (graph, eager)]
    mismatched = rng.random(count) < 2 * (eager[0] - graph[0])  # some of them wrong on both sides
    return Pairs(sides[0], np.minimum(sides[1], sides[0] + 1), mismatched, len(graph), verify)


class Traffic:
    """Iterations of `batch` requests, sampled as the schedules say; `draft` and `whole` are the extra times of samples, in replays.

    Attributes:
        extra: of each iteration, in replays.
    """

    def __init__(self, batch: int, seed: int = 0, draft: float = 0.15, whole: float = 5.0) -> None:
        self.alarm, self.samples = DriftAlarm(3), SampleSchedules()
        self.extra = list[float]()
        self._batch, self._rng, self._draft, self._whole = batch, np.random.default_rng(seed), draft, whole

    def run(self, count: int, windows: Windows) -> int | None:
        """The number of iterations until the alarm, or None."""
        for i in range(1, count + 1):
            self.alarm.count_iteration()
            sample = self.samples.next(self.alarm)
            self.extra.append(sample.taken * self._draft + sample.verify * self._whole)
            self.samples.observe(0.005 * (1 + self.extra[-1]), sample.taken, sample)
            if sample.taken:
                self.alarm.add(windows(self._rng, self._batch, sample.verify))
                if self.alarm.check():
                    return i
        return None


def loses(graph: Sequence[float], eager: Sequence[float] = RATES, in_verify: bool = False) -> Windows:
    """Graphs accept `graph` of the drafts; `in_verify`: that of verification has the fault, which samples of the draft alone replay."""
    return lambda rng, count, verify: pairs_of(rng, graph, eager if verify or not in_verify else graph, count, verify)


def near_ties(share: float, forced: bool) -> Windows:
    """Correct graphs: a `share` of the first drafts mismatch and are as often right on either side; if acceptance is `forced`, only
    those of the graphs are ever right.
    """

    def windows(rng: np.random.Generator, count: int, verify: bool) -> Pairs:
        alike, mismatched, side = hits(rng, RATES, count), rng.random(count) < share, rng.random(count)
        graph, eager = (np.where(mismatched, right, alike) for right in ((side < RATES[0]) * 1, (side > 1 - RATES[0]) * (not forced)))
        return Pairs(graph, eager, mismatched, 3, verify)

    return windows


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


def iterations(batch: int, windows: Windows, most: int, runs: int) -> np.ndarray:
    """Those until the alarm; `most` + 1 for none."""
    found = [Traffic(batch, seed).run(most, windows) for seed in range(runs)]
    return np.array([most + 1 if one is None else one for one in found])


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 32, 64])
def test_an_error_in_the_draft_extend_slots_is_reported_within_two_hundred_iterations(batch: int) -> None:
    assert np.quantile(iterations(batch, loses(FAULTY), 400, 20), 0.9) <= 200


@pytest.mark.parametrize("batch", [1, 2, 4, 16, 64])
def test_a_fall_of_five_points_is_reported_within_five_thousand_iterations(batch: int) -> None:
    assert np.quantile(iterations(batch, loses((0.34, *RATES[1:])), 5_000, 10), 0.5 if batch == 1 else 1.0) <= 5_000


@pytest.mark.parametrize("batch", [8, 32])
def test_an_error_that_only_verification_shows_is_reported_too(batch: int) -> None:
    assert iterations(batch, loses(FAULTY, in_verify=True), 2 * VERIFY.first, 6).max() <= 2 * VERIFY.first


@pytest.mark.parametrize("batch", [1, 32])
def test_graphs_that_go_wrong_later_are_noticed_as_early(batch: int) -> None:
    found = list[int]()
    for seed in range(5):
        traffic = Traffic(batch, seed)
        assert traffic.run(10_000, loses(RATES)) is None
        found.append(traffic.run(1_000, loses(FAULTY)) or 1_000)
    assert np.median(found) <= 200


@pytest.mark.parametrize("batch", [1, 32])
def test_text_that_is_accepted_otherwise_from_some_time_on_is_no_drift(batch: int) -> None:
    traffic = Traffic(batch, seed=4)
    for rates in (RATES, (0.8, 0.7, 0.6), (0.1, 0.2, 0.1), RATES):
        assert traffic.run(3_000, loses(rates, rates)) is None


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


def test_small_losses_at_every_position_add_up() -> None:
    def until(alarm: DriftAlarm, graph: Sequence[float], eager: Sequence[float]) -> int:
        rng, count = np.random.default_rng(4), 0
        while not alarm.check():
            alarm.count_iteration()
            alarm.add(pairs_of(rng, graph, eager, 4))
            count += 1
        return count

    rates, faulty = (0.9, 0.9, 0.9), (0.86, 0.86, 0.86)
    alarm = DriftAlarm(3)
    assert until(alarm, faulty, rates) < 0.6 * until(DriftAlarm(1), faulty[:1], rates[:1])
    assert all(drift.graph < drift.eager for drift in alarm.check())


def test_a_drift_that_ends_is_forgotten() -> None:
    rng, alarm = np.random.default_rng(5), DriftAlarm(1)
    for _ in range(20):
        alarm.count_iteration()
        alarm.add(pairs_of(rng, (0.1,), (0.6,), 8))
    assert alarm.check()
    for _ in range(2 * FORGET_PAIRS // 8):
        alarm.add(pairs_of(rng, (0.6,), (0.6,), 8))
    assert alarm.check() == []
    assert alarm.suspicion(verify=False) == 0


def test_more_mismatches_than_usual_are_surprising() -> None:
    drafts = MismatchDetector()
    drafts.add(1, 1)
    assert drafts.surprising, "the first is"
    for _ in range(40):
        drafts.add(1, 1)
    assert not drafts.surprising, "they are usual now"
    rng, drafts = np.random.default_rng(0), MismatchDetector()
    for _ in range(100):
        drafts.add(int(rng.random() < 0.3), 1)
    assert not drafts.surprising
    for _ in range(10):
        drafts.add(1, 1)
    assert drafts.surprising


@pytest.mark.parametrize("batch", [8, 64])
def test_a_usual_number_of_mismatches_is_not_surprising(batch: int) -> None:
    drafts = MismatchDetector()
    drafts.add(batch // 8, batch)
    assert not drafts.surprising
    drafts.add(batch, batch)
    assert drafts.surprising


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


@pytest.mark.parametrize("kind", [DRAFTS, VERIFY])
def test_samples_are_rare_without_suspicion_and_frequent_with_it(kind: SampleKind) -> None:
    schedule = SampleSchedule(kind)
    assert not any(schedule.next(0.0) for _ in range(kind.first - 1))
    assert schedule.next(0.0), "one early"
    taken = np.mean([schedule.next(0.0) for _ in range(40_000)])
    assert taken == pytest.approx(kind.share / kind.extra, rel=0.1)
    assert np.mean([schedule.next(5.0) for _ in range(20)]) > 0.9


def test_what_is_suspicious_is_sampled_at_the_next_iteration_that_can_be() -> None:
    schedule = SampleSchedule(DRAFTS)
    assert not any(schedule.next(3.0, possible=False) for _ in range(50))
    assert schedule.next(3.0)


def longest(extra: Sequence[float], window: int) -> float:
    """The most time that samples add to a stretch of `window`, in replays."""
    return float(np.convolve(extra, np.ones(window), "valid").max())


@pytest.mark.parametrize("cost", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("suspicion", [0.25, 1.0, 3.0, 12.0])
def test_samples_add_bounded_time_to_any_stretch_of_iterations(suspicion: float, cost: float) -> None:
    """However long it looks suspicious, and whatever a sample was expected to take."""
    schedule, extra = SampleSchedule(DRAFTS), list[float]()
    for _ in range(6_000):
        extra.append(cost * schedule.next(suspicion))
        if extra[-1]:
            schedule.observe(cost)
    most = min(DRAFTS.weak * np.exp(GROWTH * suspicion), DRAFTS.reserve)
    for window in (100, 700, 3_000):
        assert longest(extra, window) <= most + DRAFTS.saved * window + 2 * cost


COSTS = [(0.15, 5.0), (0.3, 8.0), (0.6, 16.0)]


@pytest.mark.parametrize(
    ("share", "batch", "forced", "cost"),
    [
        (share, batch, forced, COSTS[(i + j + forced) % 3])  # each cost with every value of the others
        for i, share in enumerate((0.0, 0.02, 0.1, 0.4, 1.0))
        for j, batch in enumerate((1, 16, 256))
        for forced in (False, True)
    ],
)
def test_samples_of_sound_graphs_cost_little_however_often_drafts_are_unlike(
    share: float, batch: int, forced: bool, cost: tuple[float, float]
) -> None:
    """A server that was just started, at any time that a sample takes. Chance costs more at times, but not on average."""
    found = [Traffic(batch, seed, *cost) for seed in range(12)]
    assert [traffic.run(2_000, near_ties(share, forced)) for traffic in found] == [None] * 12
    early, all_ = [sum(traffic.extra[:500]) for traffic in found], [sum(traffic.extra) for traffic in found]
    assert (np.median(early) < 7, np.mean(early) < 8.5) == (True, True)
    assert (np.median(all_) < 14, np.mean(all_) < 18) == (True, True)


@pytest.mark.parametrize(("draft", "whole"), COSTS)
def test_samples_of_sound_graphs_cost_less_than_seven_thousandths(draft: float, whole: float) -> None:
    for batch, share in ((1, 1.0), (4, 0.1), (64, 0.02)):
        traffic = Traffic(batch, 9, draft, whole)
        assert traffic.run(60_000, near_ties(share, forced=False)) is None
        assert sum(traffic.extra) < 0.007 * 60_000


def test_the_time_of_samples_decides_how_many_there_are() -> None:
    def samples(extra: float) -> int:
        schedule, count = SampleSchedule(DRAFTS), 0
        for _ in range(30_000):
            taken = schedule.next(0.0)
            if taken:
                schedule.observe(extra)
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
    samples, alarm = SampleSchedules(), DriftAlarm(3)
    kinds = [samples.next(alarm) for _ in range(4_000)]
    assert {EagerSample(taken=True), EagerSample(taken=True, verify=True), NO_SAMPLE} == set(kinds)
    assert sum(sample.verify for sample in kinds) == 1


def test_no_sample_delays_the_first_time_of_a_depth() -> None:
    monitor = AcceptanceMonitor(3)
    monitor.schedule = EveryNth(1)  # type: ignore[assignment]
    steps = [(3, True), (3, True), (1, True), (1, True), (1, False), (0, True), (3, True)]
    assert [monitor.choose_sample(*step).taken for step in steps] == [True, True, False, True, False, False, True]


def test_copies_of_a_request_count_once() -> None:
    emitted = np.array([[5, 6, 2], [5, 7, 2], [5, 6, 2], [5, 6, 1], [5, 7, 2]])
    assert first_of_equal(emitted).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("seconds", [(0.005, 0.005, 0.0065), (0.0065, 0.002, 0.008), (0.011, 0.0, 0.0055)])
def test_a_sample_takes_what_all_times_that_it_disturbs_show(seconds: tuple[float, ...]) -> None:
    """Launching it may make the iteration before seem long, and the sampled one short."""
    samples, sample = SampleSchedules(), EagerSample(taken=True)
    samples.observe(0.005, False, NO_SAMPLE)
    for _ in range(40):
        for time, after in zip(seconds, (NO_SAMPLE, NO_SAMPLE, sample), strict=True):
            samples.observe(time, True, after)
        samples.observe(0.005, False, NO_SAMPLE)
    assert samples._drafts._extra == pytest.approx(0.3, rel=0.01)


def test_a_short_eager_window_has_no_drafts_beyond_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = speculating(tmp_path, "EAGLE", "eager", [1, 2], depths=(3, 1, 0))
    worker.parts.monitor.schedule = EveryNth(2, verify=False)
    found = list[Pairs]()
    monkeypatch.setattr(worker.parts.monitor.alarm, "add", found.append)
    driver = Driver(worker)
    only_zeros = SamplingParams(temperature=0.0, max_new_tokens=64, logit_bias={0: 1000.0})
    driver.prefill({1: [5, 6, 7], 2: [8, 9]}, sampling=only_zeros)
    with worker.parts.depths.forced(1):
        for _ in range(8):
            driver.decode([1, 2])
    graph, eager = (np.concatenate([getattr(pairs, side) for pairs in found]).tolist() for side in ("graph", "eager"))
    assert graph == eager
    assert 0 in graph


@pytest.mark.parametrize(("steps", "nodes"), [(4, 2), (3, 3)])
def test_trees_with_fewer_nodes_than_steps_are_sampled(tmp_path: Path, steps: int, nodes: int) -> None:
    worker = speculating(tmp_path, "EAGLE", "eager", [1, 2], num_steps=steps, topk=2, num_draft_tokens=nodes)
    worker.parts.monitor.schedule = EveryNth(2)
    prompts = {1: [5, 6, 7], 2: [8, 9]}
    assert Driver(worker).generate(prompts, 12) == Driver(plain()).generate(prompts, 12)
    assert worker.eager_drafts.samples > 0
