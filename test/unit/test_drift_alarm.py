"""The drift alarm tells a fall of acceptance through graphs from chance, early, and from text that is harder to draft."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark.drift_alarm import extra_seconds, replay_seconds

from runtime.config.synthetic_acceptance import synthetic_acceptance
from runtime.model_executor.drift_alarm import LOG_ODDS, STRONG, DriftAlarm, block_evidence
from runtime.model_executor.sample_schedule import DRAFTS, EASY_RESERVE, REFILL, RESERVE, Samples, SampleSchedule
from unit.test_acceptance import draw_lens

RATES = (0.39, 0.45, 0.5)
FAULTY = (0.04, 0.45, 0.5)


class Traffic:
    """Iterations of `batch` requests, sampled as the schedules say, through graphs that accept `graph` of the drafts.

    `in_verify`: the fault is in the graph of verification, which samples of the draft alone replay.
    """

    def __init__(self, batch: int, seed: int = 0, in_verify: bool = False) -> None:
        self.alarm, self.samples = DriftAlarm(3), Samples()
        self.iterations = self.eager = 0
        self.extra = list[float]()  # of each iteration, in replays
        self._batch, self._rng, self._in_verify = batch, np.random.default_rng(seed), in_verify

    def run(self, count: int, graph: tuple[float, ...], eager: tuple[float, ...] = RATES) -> int | None:
        """The number of iterations until the alarm, or None."""
        for i in range(1, count + 1):
            sample, replay = self.samples.next(self._batch, self.alarm), replay_seconds(self._batch)
            self.iterations, self.eager = self.iterations + 1, self.eager + sample.taken
            self.extra.append(extra_seconds(self._batch, sample) / replay)
            self.samples.observe(replay * (1 + self.extra[-1]), sample)
            if sample.taken or not (sample.precedes and sample.verify):
                rates = eager if sample.taken and (sample.verify or not self._in_verify) else graph
                self.alarm.add(draw_lens(self._rng, rates, self._batch), sample.taken, verify=sample.verify)
            if sample.taken and self.alarm.check():
                return i
        return None


def add_alternately(alarm: DriftAlarm, graph: list[int], eager: list[int], parts: int) -> None:
    """Both sides in `parts` equal parts, in turn."""
    for g, e in zip(np.array_split(np.array(graph), parts), np.array_split(np.array(eager), parts), strict=True):
        alarm.add(g, eager_sample=False)
        alarm.add(e, eager_sample=True)


@pytest.mark.parametrize(("eager", "graph"), [(1, 1), (2, 14), (8, 8), (64, 480), (100, 3)])
def test_evidence_has_mean_one_where_nothing_differs(eager: int, graph: int) -> None:
    """The property that bounds false alarms, exactly, for every number of accepted drafts."""
    from scipy.stats import hypergeom

    for total in range(0, eager + graph + 1, max(1, (eager + graph) // 12)):
        counts = np.arange(max(0, total - graph), min(eager, total) + 1)
        chances = hypergeom.pmf(counts, eager + graph, total, eager)
        values = np.exp([block_evidence(int(y), eager, total - int(y), graph) for y in counts])
        assert chances @ values == pytest.approx(np.ones(len(LOG_ODDS)))


@pytest.mark.parametrize(("batch", "median", "worst"), [(2, 200, 300), (4, 150, 200), (8, 100, 200), (32, 100, 200)])
def test_an_error_in_the_draft_extend_slots_is_reported_within_two_hundred_iterations(batch: int, median: int, worst: int) -> None:
    found = [Traffic(batch, seed).run(worst, FAULTY) for seed in range(15)]
    assert None not in found
    assert np.median(np.array(found, dtype=np.float64)) <= median


def test_an_error_in_the_draft_extend_slots_of_one_request_is_reported_within_three_hundred_iterations() -> None:
    found = [Traffic(1, seed).run(1_000, FAULTY) for seed in range(15)]
    assert None not in found
    assert np.median(np.array(found, dtype=np.float64)) <= 300


@pytest.mark.parametrize("batch", [8, 32])
def test_an_error_that_only_verification_shows_is_reported_too(batch: int) -> None:
    assert None not in [Traffic(batch, seed, in_verify=True).run(1_000, FAULTY) for seed in range(4)]


@pytest.mark.parametrize("batch", [16, 64])
def test_a_fall_of_five_points_is_reported_within_five_thousand_iterations(batch: int) -> None:
    assert None not in [Traffic(batch, seed).run(5_000, (0.34, *RATES[1:])) for seed in range(3)]


@pytest.mark.parametrize(("batch", "most"), [(1, 4_000), (32, 200)])
def test_graphs_that_go_wrong_later_are_noticed_as_early(batch: int, most: int) -> None:
    """A fall of acceptance through graphs asks for samples at once."""
    traffic = Traffic(batch, seed=3)
    assert traffic.run(20_000, RATES) is None
    assert sum(traffic.extra) < traffic.iterations / 40
    assert traffic.run(most, FAULTY) is not None


@pytest.mark.parametrize("batch", [1, 32])
def test_text_that_is_accepted_otherwise_from_some_time_on_is_no_drift(batch: int) -> None:
    traffic = Traffic(batch, seed=4)
    for rates in (RATES, (0.8, 0.7, 0.6), (0.1, 0.2, 0.1), RATES):
        assert traffic.run(3_000, rates, rates) is None


def test_chance_is_no_drift() -> None:
    rng, alarm = np.random.default_rng(2), DriftAlarm(3)
    for _ in range(2_000):
        alarm.add(draw_lens(rng, RATES, 64), eager_sample=False)
        alarm.add(draw_lens(rng, RATES, 16), eager_sample=True)
        assert alarm.check() == []


def test_the_alarm_names_the_position_that_drifted() -> None:
    rng, alarm = np.random.default_rng(1), DriftAlarm(3)
    for _ in range(200):
        alarm.add(draw_lens(rng, (0.8, 0.3, 0.6), 64), eager_sample=False)
        alarm.add(draw_lens(rng, (0.8, 0.7, 0.6), 8), eager_sample=True)
    (drift,) = alarm.check()
    assert drift.position == 1
    assert drift.z < -5
    assert (drift.graph, drift.eager) == (pytest.approx(0.3, abs=0.03), pytest.approx(0.7, abs=0.03))
    assert "draft 2:" in str(drift)


def test_graphs_that_accept_more_than_eager_steps_drifted_too() -> None:
    alarm = DriftAlarm(1)
    rng = np.random.default_rng(3)
    add_alternately(alarm, rng.permutation([2] * 9_000 + [1] * 1_000).tolist(), rng.permutation([2] * 3_200 + [1] * 800).tolist(), 5)
    (drift,) = alarm.check()
    assert drift.graph > drift.eager
    assert drift.z > 5


def test_less_than_two_hundredths_are_no_drift_however_sure() -> None:
    for rejected, alarms in ((150, 0), (250, 1)):
        alarm = DriftAlarm(1)
        graph = np.random.default_rng(3).permutation([2] * (10_000 - rejected) + [1] * rejected).tolist()
        add_alternately(alarm, graph, [2] * 9_999, 5)
        assert len(alarm.check()) == alarms


def test_few_drafts_are_no_evidence_and_a_drift_that_ends_is_forgotten() -> None:
    alarm = DriftAlarm(1)
    alarm.add([1] * 5, eager_sample=False)
    alarm.add([2] * 5, eager_sample=True)
    assert alarm.check() == []
    for block in range(1, 5):
        assert alarm.check() == [], f"{block} blocks prove nothing"
        alarm.add([1] * 1_000, eager_sample=False)
        alarm.add([2] * 400, eager_sample=True)
        if block > 1 and alarm.check():
            break
    assert alarm.check()
    rng = np.random.default_rng(5)
    for _ in range(3_000):
        alarm.add(draw_lens(rng, (0.6,), 64), eager_sample=False)
        alarm.add(draw_lens(rng, (0.6,), 64), eager_sample=True)
    assert alarm.check() == []


def test_a_worker_without_drafts_has_no_alarm() -> None:
    alarm = DriftAlarm(0)
    assert alarm.check() == []
    assert alarm.suspicion == 0


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_samples_become_rare_and_the_iteration_before_them_is_announced(batch: int) -> None:
    schedule = SampleSchedule()
    flags = [schedule.next(batch, suspicion=0) for _ in range(80_000)]
    sampled = np.array([one for one, _ in flags])
    assert [two for _, two in flags[:-1]] == sampled[1:].tolist()
    assert sampled[:500].sum() == 3, "one block early"
    assert sampled[500:].mean() == pytest.approx(3 / 8000 if batch < 64 else 1 / 4000, rel=0.2), "0.2 percent of the time"
    again = np.array([schedule.next(batch, suspicion=9)[0] for _ in range(40_000)])
    assert again[:200].mean() >= 1 / 18
    assert again.mean() < 1 / 64, "suspicion that lasts costs little"


@pytest.mark.parametrize(("batch", "extra", "length"), [(1, 0.05, 6), (2, 0.05, 6), (3, 0.05, 3), (1, 2.0, 3)])
def test_cheap_blocks_of_one_or_two_requests_are_longer(batch: int, extra: float, length: int) -> None:
    schedule, flags = SampleSchedule(DRAFTS), list[bool]()
    for _ in range(24_000):
        flags.append(schedule.next(batch, suspicion=0)[0])
        schedule.observe(0.005 * (1 + extra * flags[-1]), flags[-1])
    edges = np.flatnonzero(np.diff(np.array([0, *flags[1_000:], 0])))
    blocks = (edges[1::2] - edges[::2])[1:-1]
    assert len(blocks) > 2
    assert blocks.tolist() == [length] * len(blocks)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
def test_samples_of_healthy_graphs_add_less_than_one_percent(batch: int) -> None:
    """To short runs from the start, in which speculation must pay, and to long ones."""
    short, long = [Traffic(batch, seed) for seed in range(8)], Traffic(batch, seed=9)
    for traffic in short:
        assert traffic.run(250, RATES) is None
    assert long.run(12_000, RATES) is None
    assert sum(sum(traffic.extra) for traffic in short) < 0.01 * 8 * 250
    assert sum(long.extra) < 0.01 * 12_000


def longest(extra: Sequence[float], window: int) -> float:
    """The most time that eager iterations add to a stretch of `window`, in replays."""
    return float(np.convolve(extra, np.ones(window), "valid").max())


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize(("suspicion", "reserve"), [(12.0, RESERVE), (STRONG - 0.1, EASY_RESERVE)])
def test_eager_samples_add_bounded_time_to_any_stretch_of_iterations(batch: int, suspicion: float, reserve: float) -> None:
    """However long it looks suspicious. The first samples are planned before any was timed."""
    traffic = Traffic(batch)
    told = {"suspicion": suspicion, "draft_suspicion": suspicion}
    traffic.alarm = SimpleNamespace(**told, add=lambda *batch, verify: None, check=lambda: [])  # type: ignore[assignment]
    traffic.run(6_000, RATES)
    for window in (100, 700, 3_000):
        assert longest(traffic.extra, window) <= 1.05 * (reserve + REFILL * window)


@pytest.mark.parametrize("lengths", [(3.5, 1.2, 2.5), (1.2, 3.5, 1.6)])
def test_changes_of_acceptance_under_load_leave_later_single_requests_fast(lengths: tuple[float, ...]) -> None:
    """A block that a change falls into looks like a drift, the more so the more requests it has."""
    rates = [(rate,) * 3 for length in lengths for rate in synthetic_acceptance(str(length), 3)[:1]]
    for seed in range(4):
        traffic = Traffic(256, seed)
        for one in rates:
            traffic.run(350, one, one)
        traffic.extra.clear()
        traffic._batch = 1
        traffic.run(1_500, rates[-1], rates[-1])
        assert longest(traffic.extra, 700) < 0.15 * 700


def test_depths_that_are_seldom_run_look_like_no_fall_of_acceptance() -> None:
    alarm = DriftAlarm(7)
    for _ in range(8):
        for lens in ([1, 2, 4, 1],) * 250 + ([8, 8, 8, 2],) * 2:  # at K=3, then twice at K=7
            alarm.add(lens, eager_sample=False, num_steps=7 if max(lens) > 4 else 3)
            assert alarm.suspicion == 0
    for _ in range(100):
        alarm.add([1, 1, 2, 1], eager_sample=False, num_steps=3)
    assert alarm.suspicion >= STRONG, "a real fall asks for samples"


def test_the_time_of_eager_samples_decides_how_many_there_are() -> None:
    def samples(eager_seconds: float) -> int:
        schedule, count = SampleSchedule(), 0
        for _ in range(3_000):
            sampled, precedes = schedule.next(8, suspicion=5.0)
            schedule.observe(eager_seconds if sampled or precedes else 0.005, sampled or precedes)
            count += sampled
        return count

    assert samples(0.01) > 2 * samples(0.03) > 3 * samples(0.08) > 0


def test_an_alarm_that_was_reported_asks_for_no_more_samples() -> None:
    rng, alarm = np.random.default_rng(1), DriftAlarm(3)
    for _ in range(200):
        alarm.add(draw_lens(rng, FAULTY, 64), eager_sample=False)
        alarm.add(draw_lens(rng, RATES, 8), eager_sample=True)
    assert alarm.check()
    assert alarm.suspicion < 4


def test_a_drift_is_reported_however_much_was_alike_before_it() -> None:
    rng, alarm = np.random.default_rng(6), DriftAlarm(3)
    for rates, blocks in ((RATES, 3_000), (FAULTY, 3)):
        for _ in range(blocks):
            alarm.add(draw_lens(rng, rates, 512), eager_sample=False)
            alarm.add(draw_lens(rng, RATES, 64), eager_sample=True)
    (drift,) = alarm.check()
    assert drift.eager - drift.graph > 0.25
