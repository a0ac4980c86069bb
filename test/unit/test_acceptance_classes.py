"""Acceptance apart for new text and for text copied from the prompt: counts, fallback, and what the depth controller gains by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.batch import Pending, ScheduleBatch, no_flags
from runtime.model_executor.acceptance_averages import COPIED, GREEDY, ClassAverages
from runtime.model_executor.depth_controller import STEADY, DecodeRows, DepthController, Observed, Windows
from runtime.model_executor.iteration_cost import CostPoint, IterationCost
from runtime.model_executor.row_acceptance import RowAcceptance
from runtime.sampling_params import SamplingParams
from unit.driver import Driver
from unit.predicting import VOCAB, plain, speculating
from unit.test_depth_controller import CPU, DEPTHS, GPU, UNCAPPED, Table, controller
from unit.test_served_speculation import CONTEXT, asked, prompts, serve

STRETCH = 60
"""Mean tokens of text of one kind."""


def observed(control: DepthController, lens: list[int], greedy: list[bool], copied: list[bool], depth: int = 3) -> None:
    n = len(lens)
    caps = np.full(n, UNCAPPED)
    control.observe(Observed(depth, np.array(lens), caps, np.array(greedy), n, 0, None, copied=np.array(copied, dtype=np.bool_)))


def untimed() -> DepthController:
    return DepthController(DEPTHS, IterationCost([CostPoint(1, depth, 1e-3 * (1 + 0.1 * depth)) for depth in DEPTHS]))


# ---- the averages


def test_windows_count_in_the_class_of_their_text() -> None:
    control = untimed()
    for _ in range(100):
        observed(control, [4, 1, 3, 2], [True, True, False, False], [True, False, True, False])
    info = control.info()
    assert info.greedy_copied.rates[:3] == pytest.approx([1.0] * 3, abs=0.15)
    assert info.greedy.rates[0] < 0.15
    assert info.sampled_copied.rates[:3] == pytest.approx([1.0, 1.0, 0.1], abs=0.2)
    assert info.sampled.rates[:2] == pytest.approx([1.0, 0.1], abs=0.2)
    assert [each.windows for each in (info.greedy, info.greedy_copied, info.sampled, info.sampled_copied)] == [100] * 4


@pytest.mark.parametrize("known", [0, COPIED, GREEDY, GREEDY + COPIED])
def test_a_class_without_windows_has_the_rates_of_the_other_text(known: int) -> None:
    averages = ClassAverages(7)
    for _ in range(30):
        averages.add(known, [0, 10, 5, 5, 20], 3)
    assert averages.rates(known ^ COPIED) == pytest.approx(averages.rates(known))
    assert averages.rates(known)[0] == pytest.approx(0.75, abs=0.02)
    assert averages.rates(known ^ GREEDY) == averages.rates(known ^ GREEDY ^ COPIED) == [0.6] * 7


def test_a_few_windows_move_a_class_only_in_part() -> None:
    averages = ClassAverages(3)
    for _ in range(30):
        averages.add(GREEDY, [0, 40, 0, 0, 0], 3)
    rates = [averages.rates(GREEDY + COPIED)]
    for _ in range(60):
        averages.add(GREEDY + COPIED, [0, 0, 0, 0, 1], 3)
        rates.append(averages.rates(GREEDY + COPIED))
    assert rates[0][0] < 0.01
    assert rates[2][0] < 0.2
    assert rates[-1] == pytest.approx([0.95] * 3, abs=0.2)
    assert [first for first, *_ in rates] == sorted(first for first, *_ in rates)
    assert averages.rates(GREEDY)[0] < 0.05


def test_acceptance_of_a_tuning_file_holds_until_a_class_is_measured() -> None:
    averages = ClassAverages(3, (0.9, 0.8))
    assert averages.rates(COPIED) == pytest.approx([0.9, 0.8, 0.8], abs=0.03)
    for _ in range(300):
        averages.add(0, [0, 1, 0, 0, 0], 3)
    assert averages.rates(COPIED)[0] < 0.1, "the latest of the other text"


def test_guesses_count_in_the_class_of_their_text() -> None:
    control = untimed()
    greedy, copied = np.array([True, True, True, False]), np.array([True, False, True, True])
    for _ in range(50):
        control.observe_guesses(greedy, np.array([True, False, True, True]), copied)
    info = control.info()
    assert [each.windows for each in (info.greedy, info.greedy_copied, info.sampled, info.sampled_copied)] == [50, 100, 0, 0]
    assert info.greedy.rates[0] < 0.25 < 0.75 < info.greedy_copied.rates[0]


def test_a_request_has_its_own_acceptance_for_each_text() -> None:
    rows, new, copied = np.array([1], dtype=np.int32), np.array([False]), np.array([True])
    measured, usual = RowAcceptance(2), np.array([0.6])
    for _ in range(40):
        measured.add(rows, 0, np.array([4]), np.array([3]), copied)
        measured.add(rows, 0, np.array([1]), np.array([3]), new)
    first = [measured.gains(rows, usual, 3, text)[0, 0] for text in (copied, new)]
    assert first == pytest.approx([0.97, 0.1], abs=0.05)
    measured.admit(1, 1)
    assert [measured.gains(rows, usual, 3, text)[0, 0] for text in (copied, new)] == pytest.approx([0.6, 0.6])


# ---- the choice


def test_windows_of_different_widths_go_by_the_average_of_the_text() -> None:
    """Nothing is known of the rows themselves."""
    cost = IterationCost([CostPoint(size, depth, 1e-3 * (1 + 0.2 * size * (depth + 1))) for size in (1, 32) for depth in (0, 1, 3, 7)])
    control = DepthController(DEPTHS, cost, (), RowAcceptance(33))
    for _ in range(100):
        control.observe_windows(
            Windows(3, np.array([4, 1] * 8), np.full(16, 7), np.ones(16, dtype=np.bool_), copied=np.arange(16) % 2 == 0)
        )
    numbers, copied = np.arange(1, 33, dtype=np.int32), np.arange(32) < 16
    rows = DecodeRows(np.full(32, 7), np.ones(32, dtype=np.bool_), 0, numbers, copied=copied)
    chosen = control.choose(rows, {0: 32, 3: 32}, [(32, 64)], 3)
    assert chosen.widths is not None
    assert chosen.widths[:16].min() > chosen.widths[16:].max()


@pytest.mark.parametrize(("batch", "reused"), [(1, False), (32, True)])
def test_a_choice_is_not_reused_for_other_text(batch: int, reused: bool) -> None:
    """Of many requests, one may change its text."""
    control = untimed()
    for _ in range(200):
        observed(control, [8, 1], [True, True], [True, False], 7)
    caps, greedy, copied = np.full(batch, UNCAPPED), np.ones(batch, dtype=np.bool_), np.ones(batch, dtype=np.bool_)
    for _ in range(3 * STEADY):
        before = control.choose(DecodeRows(caps, greedy, 0, copied=copied), dict.fromkeys(DEPTHS, batch))
    while control._steps % 4 == 0 or control._kept is None:
        before = control.choose(DecodeRows(caps, greedy, 0, copied=copied), dict.fromkeys(DEPTHS, batch))
    after = control.choose(DecodeRows(caps, greedy, 0, copied=copied & (np.arange(batch) > 0)), dict.fromkeys(DEPTHS, batch))
    assert (after is before) is reused


def alternating(table: Table, batch: int, rates: tuple[float, float], classes: bool, seed: int) -> float:
    """Expected tokens per second of requests that alternate between copied and new text.

    Args:
        rates: acceptance of each draft of copied and of new text.
        classes: whether the controller knows which text is copied.
    """
    rng, tokens, seconds = np.random.default_rng(seed), 0.0, 0.0
    control, caps, greedy = controller(table, batch, rng), np.full(batch, UNCAPPED), np.ones(batch, dtype=np.bool_)
    copied, left = rng.random(batch) < 0.5, rng.exponential(STRETCH, batch)
    times = {depth: 1e-3 * table.milliseconds(batch, depth) for depth in DEPTHS}
    for _ in range(2000):
        rows = DecodeRows(caps, greedy, 300 * batch, copied=copied.copy() if classes else no_flags())
        depth = control.choose(rows, dict.fromkeys(DEPTHS, batch)).depth
        each = np.repeat(np.where(copied, *rates)[:, None], depth, axis=1)
        lens = 1 + (rng.random(each.shape) < each).cumprod(axis=1).sum(axis=1)
        took, noise = times[depth], 1 + 0.03 * rng.standard_normal()
        control.observe(Observed(depth, lens, caps, greedy, batch, rows.kv_tokens, took * noise, copied=rows.copied))
        tokens, seconds = tokens + batch + float(each.cumprod(axis=1).sum()), seconds + took
        left -= lens
        ended = left <= 0
        copied, left[ended] = copied ^ ended, rng.exponential(STRETCH, int(ended.sum()))
    return tokens / seconds


def gain(table: Table, batch: int, rates: tuple[float, float], seeds: int) -> float:
    """Throughput with classes over throughput without."""
    with_classes, without = (sum(alternating(table, batch, rates, classes, seed) for seed in range(seeds)) for classes in (True, False))
    return with_classes / without


@pytest.mark.parametrize("table", [GPU, CPU])
def test_one_request_that_alternates_is_faster_with_classes(table: Table) -> None:
    assert gain(table, 1, (0.9, 0.3), 6) > 1.08


def test_a_few_requests_that_alternate_are_not_slower_with_classes() -> None:
    assert gain(GPU, 4, (0.9, 0.3), 4) > 1.0


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("batch", [1, 16])
def test_classes_cost_nothing_if_both_texts_are_accepted_alike(batch: int, rate: float) -> None:
    assert gain(GPU, batch, (rate, rate), 4 if batch == 1 else 1) > 0.995


# ---- workers


@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_worker_counts_both_texts(tmp_path: Path, algorithm: str, temperature: float) -> None:
    """The target writes one token again and again. The prompt of row 1 does so too, that of row 2 has every other token."""
    worker: Any = speculating(tmp_path, algorithm, num_steps=max(DEPTHS), depths=DEPTHS)
    sampling = SamplingParams(temperature=temperature, logit_bias={5: 90.0})
    driver, found = Driver(worker), list[tuple[int, int, int]]()
    for prompt in ([5] * 8, [token for token in range(VOCAB) if token != 5]):
        with worker.parts.depths.forced(3):
            assert driver.generate({1: prompt}, 40, sampling=sampling, room=160)[1] == [5] * 40
        info = worker.info().depth
        new, copied = (info.sampled, info.sampled_copied) if temperature else (info.greedy, info.greedy_copied)
        found.append((new.windows, copied.windows, info.greedy.windows + info.sampled.windows - new.windows))
        driver = Driver(worker)
    (first_new, first_copied, _), (new, copied, others) = found
    assert first_new < 5 < first_copied
    assert new > first_new + 5
    assert copied == first_copied
    assert others == 0


def test_rows_come_with_their_whole_text_after_cache_hits_and_retractions() -> None:
    roomy = {"context_length": CONTEXT, "max_running_requests": 8}
    worker, seen = plain(**roomy, max_total_tokens=320), list[tuple[list[int], list[int]]]()
    submit, ids = worker.submit, prompts()

    def recorded(batch: ScheduleBatch) -> Pending:
        for init in batch.new_rows:
            tokens = init.tokens.tolist()
            seen.append((tokens[: init.prompt_len], tokens[init.prompt_len :]))
        return submit(batch)

    worker.submit = recorded
    asks = asked(SamplingParams(temperature=0.0, max_new_tokens=50), ids)
    texts, scheduler = serve(worker, asks, {}, schedule_conservativeness=0.05)
    assert min(scheduler.stats.num_retracted_requests_total, scheduler.stats.cached_tokens_total) > 0
    assert sorted(prompt for prompt, output in seen if not output) == sorted(ids)
    resumed = [(texts[str(ids.index(prompt))], output) for prompt, output in seen if output]
    assert resumed
    assert all(text[: len(output)] == output for text, output in resumed)
