"""The depth controller against an exhaustive simulation of fixed depths, its averages, its probes and its hysteresis."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from runtime.config.synthetic_acceptance import synthetic_acceptance
from runtime.model_executor.acceptance_averages import AcceptanceAverages, expected_tokens
from runtime.model_executor.depth_controller import DecodeRows, DepthController, Observed
from runtime.model_executor.depth_option import Option, best_option
from runtime.model_executor.iteration_cost import CostPoint, DistinctExperts, IterationCost
from runtime.model_executor.row_acceptance import RowAcceptance

DEPTHS = (0, 1, 2, 3, 5, 7)
UNCAPPED = 1 << 15
PLAIN = {1: 4.16, 16: 5.90, 64: 11.66, 256: 35.0}
DRAFTED = {1: 5.97, 16: 11.07, 64: 26.8, 256: 96.4}
"""Milliseconds of an iteration of the 8B model without drafts and with three, from the crossover benchmark: batch / (tokens/s / accept
length)."""

FOLLOWING = 0.1
"""Share of an iteration with drafts in which the draft follows."""


@dataclass(frozen=True)
class Table:
    """A true cost table: straight lines in K between 0 and 3 and beyond, with `more` milliseconds for each further draft."""

    plain: Mapping[int, float]
    drafted: Mapping[int, float]

    def milliseconds(self, size: int, depth: int) -> float:
        at0, at3 = (float(np.interp(size, list(points), list(points.values()))) for points in (self.plain, self.drafted))
        return at0 + (at3 - at0) * depth / 3


GPU = Table(PLAIN, DRAFTED)
CPU = Table({1: 31.5, 2: 48.5, 4: 55.0, 8: 63.2, 16: 94.0}, {1: 46.1, 2: 79.0, 4: 119.5, 8: 157.6, 16: 271.5})
"""Of the embedded model on two cores, from the same benchmark's figures."""


@functools.cache
def rates(accept_length: float) -> tuple[float, ...]:
    """Acceptance of each position: that of a chain of three drafts with this accept length."""
    return synthetic_acceptance(str(accept_length), 3)[:1] * max(DEPTHS)


@functools.cache
def expected(accept_length: float, depth: int) -> float:
    """Tokens per request of an iteration at this depth."""
    return float(1 + np.cumprod(rates(accept_length)[:depth]).sum())


def controller(table: Table, batch: int, rng: np.random.Generator, error: float = 0.03) -> DepthController:
    sizes = [size for size in (1, 4, 16, 64, 256) if size <= max(batch, max(table.plain))]
    points = [CostPoint(s, d, 1e-3 * table.milliseconds(s, d) * (1 + error * rng.standard_normal())) for s in sizes for d in (0, 1, 3, 7)]
    return DepthController(DEPTHS, IterationCost(points))


def run(
    control: DepthController, table: Table, batch: int, acceptance: Callable[[int], float], rng: np.random.Generator, iterations: int
) -> tuple[float, float, list[int]]:
    """Tokens of all requests, as expected at the depths that were chosen, seconds, and the depth of each iteration."""
    tokens, seconds, following, depths = 0.0, 0.0, 0.0, []
    times = {depth: 1e-3 * table.milliseconds(batch, depth) for depth in DEPTHS}
    rows = DecodeRows(np.full(batch, UNCAPPED), np.ones(batch, dtype=np.bool_), 300 * batch)
    for step in range(iterations):
        depth = control.choose(rows, dict.fromkeys(DEPTHS, batch)).depth
        accepted = rng.random((batch, depth)) < np.array(rates(acceptance(step))[:depth])
        lens = 1 + accepted.cumprod(axis=1).sum(axis=1)
        took, own = times[depth], FOLLOWING * times[depth] if depth else 0.0
        seen, following = took + (following if depths[-1:] != [0] else own) - own, own
        control.observe(Observed(depth, lens, rows.caps, rows.greedy, batch, rows.kv_tokens, seen * (1 + 0.03 * rng.standard_normal())))
        tokens, seconds = tokens + batch * expected(acceptance(step), depth), seconds + took
        depths.append(depth)
    return tokens, seconds, depths


def fixed_rate(table: Table, batch: int, acceptance: Callable[[int], float], depth: int, iterations: int) -> float:
    """Expected tokens per second at a fixed depth."""
    counts: dict[float, int] = {}
    for step in range(iterations):
        counts[acceptance(step)] = counts.get(acceptance(step), 0) + 1
    tokens = sum(n * expected(length, depth) for length, n in counts.items()) * batch
    return tokens / (iterations * 1e-3 * table.milliseconds(batch, depth))


def every_second(batches: Sequence[int], accept_lengths: Sequence[float]) -> list[tuple[int, float]]:
    """Every second pair, as on a chess board: each is between two of the list in both directions."""
    return [(batch, length) for i, batch in enumerate(batches) for j, length in enumerate(accept_lengths) if (i + j) % 2 == 0]


def check_against_fixed(table: Table, batch: int, acceptance: Callable[[int], float], iterations: int) -> None:
    rng = np.random.default_rng(batch)
    tokens, seconds, depths = run(controller(table, batch, rng), table, batch, acceptance, rng, iterations)
    best = max(fixed_rate(table, batch, acceptance, depth, iterations) for depth in DEPTHS)
    plain = fixed_rate(table, batch, acceptance, 0, iterations)
    rate = tokens / seconds
    counts = {depth: depths.count(depth) for depth in DEPTHS}
    assert rate >= 0.97 * best, f"{rate:.0f} against {best:.0f} tokens/s; {counts}"
    assert rate >= 0.99 * plain, f"{rate:.0f} against {plain:.0f} tokens/s; {counts}"


@pytest.mark.parametrize(("batch", "accept_length"), every_second((1, 2, 4, 8, 16, 32, 64, 128, 256), (1.2, 1.6, 2.5, 3.5)))
def test_steady_acceptance_is_within_three_percent_of_the_best_depth(batch: int, accept_length: float) -> None:
    check_against_fixed(GPU, batch, lambda step: accept_length, 1600)


@pytest.mark.parametrize(("batch", "accept_length"), every_second((1, 2, 4, 8, 16), (1.2, 1.6, 2.5, 3.5)))
def test_a_cpu_is_within_three_percent_of_its_best_depth(batch: int, accept_length: float) -> None:
    check_against_fixed(CPU, batch, lambda step: accept_length, 1600)


@pytest.mark.parametrize("table", [GPU, CPU])
@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_acceptance_that_falls_and_returns_is_followed(table: Table, batch: int) -> None:
    if batch <= max(table.plain):
        check_against_fixed(table, batch, lambda step: 1.2 if 2000 <= step < 4000 else 3.5, 6000)


# ---- the parts


def test_averages_extrapolate_positions_that_were_not_drafted() -> None:
    averages = AcceptanceAverages(7)
    for _ in range(40):
        averages.add([0, 1, 1, 2], 2)  # 3 of 4 accept the first draft, 2 of 3 of those the second
    rates = averages.rates()
    assert rates[:2] == pytest.approx([0.75, 2 / 3], abs=0.02)
    assert rates[2:] == pytest.approx([2 / 3] * 5, abs=0.02)
    assert expected_tokens(rates) == pytest.approx((1.0, *(1 + np.cumprod(rates).cumsum())))


def test_a_change_of_acceptance_shows_within_a_few_windows() -> None:
    averages = AcceptanceAverages(3)
    for _ in range(300):
        averages.add([0, 1, 0, 0, 0], 3)
    assert averages.rates()[0] < 0.05
    for _ in range(10):
        averages.add([0, 0, 0, 0, 1], 3)
    assert averages.rates()[0] > 0.3


def test_classes_and_caps_are_counted_apart() -> None:
    control = DepthController(DEPTHS, IterationCost([CostPoint(1, 0, 1e-3)]))
    caps, greedy = np.array([1, 7, 7]), np.array([True, True, False])
    for _ in range(100):
        control.observe(Observed(3, np.array([2, 4, 1]), caps, greedy, 3, 0, None))
    info = control.info()
    assert info.greedy.rates[:3] == pytest.approx([0.99, 0.98, 0.98], abs=0.03), "a cap is no rejection"
    assert info.sampled.rates[0] < 0.05
    assert info.greedy.tokens[3] > 3.8 > 1.1 > info.sampled.tokens[3]


def test_a_request_with_a_cap_counts_for_no_more_than_its_cap() -> None:
    flat = IterationCost([CostPoint(1, depth, 1e-3 * (1 + 0.1 * depth)) for depth in DEPTHS])
    rows = DecodeRows(np.array([0] * 30 + [7]), np.ones(31, dtype=np.bool_), 0)
    assert DepthController(DEPTHS, flat).choose(rows, dict.fromkeys(DEPTHS, 1)).depth == 0
    every = DecodeRows(np.full(31, 7), np.ones(31, dtype=np.bool_), 0)
    assert DepthController(DEPTHS, flat).choose(every, dict.fromkeys(DEPTHS, 1)).depth > 1


def test_a_slightly_better_depth_does_not_replace_the_current_one() -> None:
    options = [Option(2, 2.00, 1.0), Option(3, 2.02, 1.0), Option(5, 1.0, 1.0)]
    assert best_option(options, None).depth == 3
    assert best_option(options, 2).depth == 2
    assert best_option(options, 5).depth == 3
    assert best_option(options, 7).depth == 3, "a depth that cannot run now is not held"


@pytest.mark.parametrize("batch", [16, 128, 256])
def test_probes_cost_less_than_one_percent(batch: int) -> None:
    rng = np.random.default_rng(0)
    tokens, seconds, depths = run(controller(GPU, batch, rng), GPU, batch, lambda step: 1.0, rng, 3000)
    steady = depths[500:]
    assert 0 < len(steady) - steady.count(0) < 0.1 * len(steady)
    assert tokens / seconds >= 0.99 * fixed_rate(GPU, batch, lambda step: 1.0, 0, 3000)


def test_the_depth_does_not_flap() -> None:
    """Probes, of at most two iterations, aside."""
    rng = np.random.default_rng(1)
    _, _, depths = run(controller(GPU, 32, rng), GPU, 32, lambda step: 2.5, rng, 3000)
    stretches = [list(same) for _, same in itertools.groupby(depths[500:])]
    steady = [depth for stretch in stretches if len(stretch) > 2 for depth in stretch]
    assert sum(a != b for a, b in itertools.pairwise(steady)) < 0.01 * len(steady)


def test_the_less_a_depth_promises_the_more_seldom_it_is_tried() -> None:
    rng = np.random.default_rng(0)
    _, _, depths = run(controller(GPU, 4, rng), GPU, 4, lambda step: 1.6, rng, 6000)
    tried = [depths.count(depth) for depth in (3, 5, 7)]
    assert tried == sorted(tried, reverse=True)
    assert 0 < tried[-1] < 12, "never forgotten"


@pytest.mark.parametrize("factor", [1.3, 1.6, 2.0, 3.0])
@pytest.mark.parametrize("accept_length", [2.0, 2.5, 3.5])
@pytest.mark.parametrize(("table", "batch", "within"), [(GPU, 1, 100), (CPU, 1, 100), (GPU, 4, 100), (GPU, 16, 300), (GPU, 64, 350)])
def test_a_start_up_measurement_on_a_busy_machine_is_corrected(
    table: Table, batch: int, within: int, accept_length: float, factor: float
) -> None:
    """Drafts of all depths seemed to take `factor` times as long as they do."""
    rng, sizes = np.random.default_rng(batch), [size for size in (1, 4, 16, 64) if size <= max(table.plain)]
    points = [
        CostPoint(s, d, 1e-3 * table.milliseconds(s, d) * (factor if d else 1) * (1 + 0.03 * rng.standard_normal()))
        for s in sizes
        for d in (0, 1, 3, 7)
    ]
    _, _, depths = run(DepthController(DEPTHS, IterationCost(points)), table, batch, lambda step: accept_length, rng, within + 200)
    seconds = sum(1e-3 * table.milliseconds(batch, depth) for depth in depths[within:])
    tokens = batch * sum(expected(accept_length, depth) for depth in depths[within:])
    assert tokens / seconds >= 0.9 * max(fixed_rate(table, batch, lambda step: accept_length, depth, 1) for depth in DEPTHS)


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_drafts_that_do_not_pay_cost_little_after_a_busy_start(batch: int) -> None:
    rng = np.random.default_rng(batch)
    points = [CostPoint(s, d, 1e-3 * GPU.milliseconds(s, d) * (3 if d else 1)) for s in (1, 4, 16, 64) for d in (0, 1, 3, 7)]
    tokens, seconds, _ = run(DepthController(DEPTHS, IterationCost(points)), GPU, batch, lambda step: 1.0, rng, 1600)
    assert tokens / seconds >= 0.99 * fixed_rate(GPU, batch, lambda step: 1.0, 0, 1600)


@pytest.mark.parametrize(("seconds", "learned"), [(9e-3, False), (3e-3, True)])
def test_the_window_that_catches_up_is_not_taken_for_the_time_of_a_depth(seconds: float, learned: bool) -> None:
    control = DepthController(DEPTHS, IterationCost([CostPoint(1, depth, 4e-3 + 1e-3 * depth) for depth in DEPTHS]))
    rows, before = (np.array([7]), np.array([True])), control.cost.seconds(1, 1)
    control.observe(Observed(0, np.array([1]), *rows, 1, 0, 4e-3))
    control.observe(Observed(1, np.array([1]), *rows, 1, 0, seconds))
    assert (control.cost.seconds(1, 1) < before) is learned
    assert control.cost.seconds(1, 1) <= before
    control.observe(Observed(1, np.array([1]), *rows, 1, 0, 9e-3))
    assert control.cost.seconds(1, 1) > before - 1e-3 * learned


def test_iterations_between_those_of_unknown_time_are_timed() -> None:
    """As where every other one is delayed by eager drafts."""
    control = controller(GPU, 1, np.random.default_rng(0), error=0.0)
    expected_at_start, one = control.cost.seconds(1, 3), np.ones(1, dtype=np.int64)
    for step in range(100):
        seconds = None if step % 2 else 0.8 * expected_at_start
        control.observe(Observed(3, one, one * UNCAPPED, one > 0, 1, 0, seconds))
    assert control.cost.seconds(1, 3) == pytest.approx(0.8 * expected_at_start, rel=0.03)


def test_times_of_passes_over_a_shared_prefix_are_not_learned() -> None:
    control = controller(GPU, 1, np.random.default_rng(0), error=0.0)
    at_start, one = control.cost.seconds(1, 3), np.ones(1, dtype=np.int64)
    for _ in range(100):
        control.observe(Observed(3, one, one * UNCAPPED, one > 0, 1, 0, 0.8 * at_start, shared=True))
    assert control.cost.seconds(1, 3) == at_start


def test_requests_that_would_end_together_ask_more_of_drafts() -> None:
    """Drafts promise 6 % more; without them all requests would end in one step."""
    rate = AcceptanceAverages(7).rates()[0]
    cost = IterationCost([CostPoint(size, depth, 4e-3 * (1 + rate) / 1.06 if depth else 4e-3) for size in (1, 16) for depth in (0, 1)])
    caps, greedy = np.full(16, 1), np.ones(16, dtype=np.bool_)
    for left, depth in [(np.full(16, 100), 0), (np.arange(100, 900, 50), 1)]:
        rows = DecodeRows(caps, greedy, 0, left=left)
        assert DepthController(DEPTHS, cost).choose(rows, {0: 16, 1: 16}).depth == depth


# ---- a batch whose requests are accepted differently


MEANS = (2, 3)
"""Mean widths of the passes over windows that differ, at depth 3."""


def modelled(size: int, depth: int, width: int = 0) -> float:
    """Seconds of an iteration of the 8B model on one H200: weights and launches, 35 us for a row of the target's pass, draft passes."""
    return 5e-3 + 35e-6 * size * (width or depth + 1) + depth * (350e-6 + 3e-6 * size)


def run_mixed(batch: int, firsts: np.ndarray, iterations: int, caps: np.ndarray | None = None) -> tuple[float, DepthController]:
    """Tokens per second with the controller; `firsts`: acceptance of every draft of each request."""
    rng = np.random.default_rng(batch)
    points = [CostPoint(s, d, modelled(s, d) * (1 + 0.03 * rng.standard_normal())) for s in (1, 4, 16, 64, 256) for d in (0, 1, 3, 7)]
    control, numbers = DepthController(DEPTHS, IterationCost(points), (), RowAcceptance(batch + 1)), np.arange(1, batch + 1, dtype=np.int32)
    caps = np.full(batch, UNCAPPED) if caps is None else caps
    rows = DecodeRows(caps, np.ones(batch, dtype=np.bool_), 0, numbers)
    tokens = seconds = 0.0
    for row in numbers.tolist():
        control.rows.admit(row, 0)
    for _ in range(iterations):
        chosen = control.choose(rows, dict.fromkeys(DEPTHS, batch), [(batch, batch * mean) for mean in MEANS], 3)
        drafts = np.minimum(caps, chosen.depth if chosen.widths is None else chosen.widths - 1)
        width = 0 if chosen.widths is None else int(chosen.widths.sum()) // batch
        accepted = (rng.random((batch, chosen.depth)) < firsts[:, None]) & (np.arange(chosen.depth) < drafts[:, None])
        lens, took = 1 + accepted.cumprod(axis=1).sum(axis=1), modelled(batch, chosen.depth, width)
        control.observe(
            Observed(chosen.depth, lens, drafts, rows.greedy, batch, 0, took * (1 + 0.03 * rng.standard_normal()), width, numbers)
        )
        tokens, seconds = tokens + float(lens.sum()), seconds + took
    return tokens / seconds, control


def best_fixed(batch: int, firsts: np.ndarray) -> float:
    return max(float((1 + np.cumprod(np.repeat(firsts[:, None], d, 1), 1).sum(1)).sum()) / modelled(batch, d) for d in DEPTHS)


def two_kinds(batch: int) -> np.ndarray:
    """Every second request has the accept length 3.5 in a chain of three, the others 1.2."""
    return np.array([rates(3.5)[0], rates(1.2)[0]])[np.arange(batch) % 2]


@pytest.mark.parametrize(("batch", "gain"), [(32, 1.06), (64, 1.09), (128, 1.03)])
def test_windows_of_two_kinds_of_requests_beat_every_fixed_depth(batch: int, gain: float) -> None:
    got, control = run_mixed(batch, two_kinds(batch), 1500)
    assert got > gain * best_fixed(batch, two_kinds(batch))
    assert control.ragged > 1000


def test_windows_differ_only_where_that_is_faster() -> None:
    got, control = run_mixed(256, two_kinds(256), 1500)
    assert control.ragged < 100, "a row costs more than the drafts of the better half are worth"
    assert got > 0.97 * best_fixed(256, two_kinds(256))


def test_mixed_caps_narrow_the_windows_of_capped_requests() -> None:
    batch, caps = 64, np.where(np.arange(64) % 2, UNCAPPED, 0)
    got, control = run_mixed(batch, np.full(batch, rates(3.5)[0]), 400, caps)
    tokens = [batch / 2 * (1 + float(np.cumprod(np.full(batch, rates(3.5)[0])[:d]).sum()) + 1) for d in DEPTHS]
    assert got > 1.05 * max(each / modelled(batch, d) for each, d in zip(tokens, DEPTHS, strict=True))
    assert control.ragged > 300


@pytest.mark.parametrize("accept_length", [1.2, 2.5, 3.5])
@pytest.mark.parametrize("batch", [32, 128])
def test_requests_of_one_kind_lose_nothing_by_being_measured(batch: int, accept_length: float) -> None:
    firsts = np.full(batch, rates(accept_length)[0])
    got, _ = run_mixed(batch, firsts, 1500)
    assert got > 0.97 * best_fixed(batch, firsts)


def test_a_row_forgets_the_request_that_had_it() -> None:
    measured, usual = RowAcceptance(3), np.full(2, 0.6)
    rows = np.array([1, 2], dtype=np.int32)
    for _ in range(40):
        measured.add(rows, 0, np.array([4, 1]), np.array([3, 3]))
    assert measured.gains(rows, usual, 3)[:, 0].tolist() == pytest.approx([0.97, 0.1], abs=0.03)
    measured.admit(2, 1)
    measured.add(rows[:1], 1, np.array([4]), np.array([3]))
    assert measured.gains(rows, usual, 3)[1] == pytest.approx([0.6, 0.36, 0.216])


def test_a_row_counts_no_step_that_was_submitted_before_its_request_came() -> None:
    measured, usual = RowAcceptance(3), np.full(2, 0.6)
    rows = np.array([1, 2], dtype=np.int32)
    measured.admit(2, step=6)  # step 5, in which another request had the row, is read later
    measured.add(rows, 5, np.array([4, 4]), np.array([3, 3]))
    first, second = measured.gains(rows, usual, 3)[:, 0]
    assert (first > 0.7, second) == (True, pytest.approx(0.6))


def test_a_row_that_takes_no_drafts_is_tried_again() -> None:
    measured, usual, rows = RowAcceptance(2), np.full(1, 0.8), np.array([1], dtype=np.int32)
    for _ in range(60):
        measured.add(rows, 0, np.array([1]), np.array([3]))
    low = measured.gains(rows, usual, 3)[0, 0]
    for _ in range(200):
        measured.add(rows, 0, np.array([1]), np.array([0]))
    assert low < 0.3 < 0.6 < measured.gains(rows, usual, 3)[0, 0]


# ---- sparse models

QWEN3_30B = DistinctExperts(num_experts=128, top_k=8)


def sparse_seconds(size: int, depth: int, independence: float = 1.0) -> float:
    """Seconds of an iteration of Qwen3-30B-A3B by bytes at 4.3 TB/s: 2.3 GB read always, 0.42 GB an expert, 0.35 GB a draft pass."""
    distinct = replace(QWEN3_30B, independence=independence).distinct(size * (depth + 1))
    return (2.3 + 0.42 * distinct + 0.35 * depth) / 4300


def sparse_cost() -> IterationCost:
    return IterationCost([CostPoint(s, d, sparse_seconds(s, d)) for s in (1, 16, 256) for d in (0, 3, 7)], QWEN3_30B)


def test_distinct_experts_follow_random_routing() -> None:
    assert QWEN3_30B.distinct(1) == pytest.approx(8)
    assert QWEN3_30B.distinct(4) == pytest.approx(29.1, abs=0.1)
    assert QWEN3_30B.distinct(4096) == pytest.approx(128)
    assert replace(QWEN3_30B, independence=0.5).distinct(9) == pytest.approx(QWEN3_30B.distinct(5))


@pytest.mark.parametrize("size", [2, 4, 6, 32, 64])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_experts_are_counted_between_the_points_that_were_measured(size: int, depth: int) -> None:
    assert sparse_cost().seconds(size, depth) == pytest.approx(sparse_seconds(size, depth), rel=0.06)


@pytest.mark.parametrize("independence", [0.0, 0.5])
def test_tokens_that_share_experts_make_windows_cheaper(independence: float) -> None:
    cost = sparse_cost()
    cost.correct(independence)
    for size, depth in [(1, 3), (4, 3), (8, 1)]:
        assert cost.seconds(size, depth) == pytest.approx(sparse_seconds(size, depth, independence), rel=0.1)
    IterationCost([CostPoint(1, 0, 1e-3)]).correct(independence)  # a dense model has none


@pytest.mark.parametrize(("size", "best"), [(1, 0), (2, 0), (16, 3), (64, 3)])
def test_few_requests_of_a_sparse_model_run_without_drafts(size: int, best: int) -> None:
    """At the accept length 2.1 of chat."""
    cost, tokens = sparse_cost(), 1 + np.cumsum([0.7, 0.4, 0.2])
    assert max((0, 3), key=lambda depth: (1.0, *tokens)[depth] / cost.seconds(size, depth)) == best
