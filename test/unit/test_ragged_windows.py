"""Windows of one batch that differ in width: exact text, fewer tokens in the target's pass, graphs as eager passes, counts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from runtime.batch import ScheduleBatch
from runtime.layers.linear import Linear
from runtime.managers.messages import GenerateReq
from runtime.model_executor import depth_controller, depth_costs, verification
from runtime.model_executor.iteration_cost import CostPoint, IterationCost
from runtime.model_executor.ragged_windows import mean_widths
from runtime.model_executor.window_widths import assign_widths
from runtime.sampling_params import SamplingParams
from unit.driver import GREEDY, Driver
from unit.predicting import VOCAB, exact_product, plain, speculating
from unit.storm import SIZES, Storm, same_life
from unit.test_eagle_worker import MIXED
from unit.test_served_speculation import CONTEXT, prompts, serve

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 3)}
CAPPED = tuple(structs.replace(MIXED[i % 4], speculative_num_steps=cap) for i, cap in enumerate((None, 0, 1, None, 2, 0, 0, 3, None)))
ALGORITHMS = ["EAGLE", "EAGLE3", "STANDALONE", "DFLASH"]


def forced(worker: Any, monkeypatch: pytest.MonkeyPatch, widths: list[int], depth: int = 3) -> None:
    """The next steps have windows of these widths."""

    def choose(batch: ScheduleBatch) -> None:
        batch.depth, batch.widths = depth, np.array(widths if batch.num_decodes else [], dtype=np.int32)

    monkeypatch.setattr(worker.parts.depths, "choose", choose)


def verified_tokens(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each pass of the target from now on."""
    model, seen = worker.parts.target.runner.model, list[int]()
    forward = model.forward

    def counted(batch: Any, *args: Any) -> Any:
        seen.append(batch.num_tokens)
        return forward(batch, *args)

    monkeypatch.setattr(model, "forward", counted)
    return seen


# ---- which window gets how many tokens


def test_tokens_go_to_the_drafts_that_promise_most() -> None:
    gains = np.array([[0.9, 0.8, 0.7], [0.2, 0.05, 0.01]])
    assert assign_widths(gains, 2, 5).tolist() == [4, 1]
    assert assign_widths(gains, 2, 6).tolist() == [4, 2]
    assert assign_widths(gains, 2, 8).tolist() == [4, 4]
    assert assign_widths(gains, 2, 2).tolist() == [1, 1]


def test_tokens_without_promise_go_to_the_padding() -> None:
    capped = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert assign_widths(capped, 4, 9).tolist() == [4, 1, 2, 2]
    assert assign_widths(capped, 4, 14).tolist() == [4, 2, 4, 4], "each window has at most D"


def test_widths_always_add_up() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, K = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        size = n + int(rng.integers(0, 4))
        tokens = int(rng.integers(size, size * (K + 1) + 1))
        gains = np.cumprod(rng.random((n, K)), axis=1) * (np.arange(K) < rng.integers(0, K + 1, (n, 1)))
        widths = assign_widths(gains, size, tokens)
        assert widths.sum() == tokens
        assert widths.min() >= 1
        assert widths.max() <= K + 1


def test_graphs_have_half_and_three_quarters_of_the_tokens() -> None:
    assert [list(mean_widths(depth)) for depth in (1, 2, 3, 5, 7)] == [[], [2], [2, 3], [3, 4], [4, 6]]


# ---- the text


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "NGRAM"])
def test_every_combination_of_widths_gives_the_text_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    samplings = {1: GREEDY, 2: MIXED[2], 3: GREEDY}
    expected = Driver(plain()).generate(PROMPTS, 64, sampling=samplings)
    worker: Any = speculating(tmp_path, algorithm, num_steps=3)
    driver, seen = Driver(worker), verified_tokens(worker, monkeypatch)
    driver.prefill(PROMPTS, sampling=samplings, room=240)
    accepted = set[tuple[int, int]]()
    for widths in itertools.product((1, 2, 3, 4), repeat=3):
        rows = [row for row in PROMPTS if len(driver.out[row]) < 64]
        seen.clear()
        forced(worker, monkeypatch, list(widths[: len(rows)]))
        lens = driver.decode(rows).accept_lens.tolist() if rows else []
        assert seen == ([sum(widths[: len(rows)])] if rows else [])
        assert all(length <= width for length, width in zip(lens, widths, strict=False))
        accepted.update(zip(widths, lens, strict=False))
    assert {row: driver.out[row][:64] for row in PROMPTS} == expected
    assert {(1, 1), (2, 2)} <= accepted or algorithm == "NGRAM", "drafts are accepted"


@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
def test_sampled_text_is_that_of_the_same_drafts_in_full_windows(tmp_path: Path, algorithm: str) -> None:
    """Seeded requests of several depths: a draft that is not verified and one that is not taken leave the same draw."""

    def texts(ragged: bool) -> dict[int, list[int]]:
        worker: Any = speculating(tmp_path, algorithm, num_steps=3)
        if not ragged:
            worker.parts.verifier.ragged.clear()
        asks = {row: SamplingParams(temperature=0.8, seed=row, speculative_num_steps=cap) for row, cap in ((1, 1), (2, None), (3, 2))}
        return Driver(worker).generate(PROMPTS, 40, sampling=asks, room=160)

    assert texts(True) == texts(False)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_life_of_capped_requests_is_the_same_in_full_and_ragged_windows_and_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Batches from 1 to 33, retracted, resumed, with shared prefixes and aborts; unused memory is poisoned between the steps."""
    monkeypatch.setattr(Linear, "__call__", exact_product)
    monkeypatch.setattr(verification, "MIN_REQUESTS", 4)

    def life(replay: str | None, ragged: bool = True) -> tuple[Storm, Any]:
        worker: Any = speculating(tmp_path, algorithm, replay, SIZES if replay else None, runtime={"page_size": 16}, num_steps=3)
        if not ragged:
            worker.parts.verifier.ragged.clear()
        return Storm(worker, 7, CAPPED, poison=replay is not None).run(8), worker

    full, _ = life(None, ragged=False)
    for replay in (None, "eager"):
        storm, worker = life(replay)
        same_life(full, storm)
        ran = [worker.parts.verifier.runners[3], *worker.parts.verifier.ragged.values()]
        assert sum(runner.replayed + runner.ran_eagerly for runner in ran[1:]) > 3
        assert all(runner.replayed for runner in ran[1:]) == (replay is not None)


@pytest.mark.parametrize("overlap", [True, False])
def test_served_text_survives_retraction_and_prefix_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    monkeypatch.setattr(verification, "MIN_REQUESTS", 2)
    roomy = {"context_length": CONTEXT, "max_running_requests": 8}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=50)
    asks = [
        GenerateReq(rid=str(i), input_ids=ids, sampling=structs.replace(sampling, speculative_num_steps=(None, 0, 1, 0)[i % 4]), seed=i)
        for i, ids in enumerate(prompts())
    ]
    expected, _ = serve(plain(**roomy), asks, {}, radix_cache=False)
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [2, 4, 8], runtime={**roomy, "max_total_tokens": 320})
    got, scheduler = serve(worker, asks, {}, overlap=overlap, schedule_conservativeness=0.05)
    assert got == expected
    assert sum(runner.replayed for runner in worker.parts.verifier.ragged.values()) > 10
    stats = scheduler.stats
    assert min(stats.num_retracted_requests_total, stats.cached_tokens_total, stats.spec.accepted_tokens) > 0
    assert stats.num_failed_steps_total == 0
    assert stats.spec.accepted_tokens == sum(stats.spec.accepted_by_position)


@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
@pytest.mark.parametrize("replay", [None, "eager"])
def test_text_is_exact_where_the_controller_gives_each_request_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, replay: str | None
) -> None:
    """It takes windows that differ at least every second time, here, and goes by the acceptance that it measures for each request."""
    monkeypatch.setattr(verification, "MIN_REQUESTS", 2)
    monkeypatch.setattr(depth_controller, "RAGGED_GAIN", -1.0)
    monkeypatch.setattr(depth_controller, "RAGGED_EVERY", 1)
    # Times of this machine would decide how deep windows are: drafts are cheap here, whatever it is busy with.
    points = [CostPoint(size, depth, 1e-3 * (10 + 0.1 * size * (depth + 1))) for size in (1, 6) for depth in (0, 1, 3, 7)]
    monkeypatch.setattr(depth_costs, "measure", lambda _: points)
    monkeypatch.setattr(IterationCost, "observe", lambda *_: None)
    rows = {r: PROMPTS[1 + r % 3] for r in range(1, 7)}
    samplings = {r: GREEDY if r < 4 else MIXED[2] for r in rows}
    expected = Driver(plain()).generate(rows, 40, sampling=samplings, room=160)
    auto: dict[str, Any] = {"num_steps": 7, "depths": (0, 1, 2, 3, 5, 7)}
    worker: Any = speculating(tmp_path, algorithm, replay, [2, 4, 6] if replay else [], runtime={"max_running_requests": 6}, **auto)
    driver = Driver(worker)
    assert driver.generate(rows, 40, sampling=samplings, room=240) == expected
    assert worker.info().depth.ragged > 3
    drafts = [result.stats.drafts for result in driver.results if result.stats.drafts]
    assert len(set(drafts)) > 2
    assert sum(runner.replayed for runner in worker.parts.verifier.ragged.values()) > 3 or not replay


# ---- what runs, and what is counted


def test_caps_save_tokens_of_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = speculating(tmp_path, "EAGLE", num_steps=3)
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling={r: structs.replace(GREEDY, speculative_num_steps=c) for r, c in ((1, 0), (2, None), (3, 1))})
    seen = verified_tokens(worker, monkeypatch)
    drafts = [driver.decode(rows).stats.drafts for rows in ([1, 2, 3], [3, 2, 1], [2], [1, 3])]
    assert seen == [7, 7, 4, 3]
    assert drafts == [(0, 3, 1), (1, 3, 0), (), (0, 1)]


def test_capped_batches_run_in_the_smallest_graph_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MIN_REQUESTS", 4)
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [1, 2, 4, 8], num_steps=3, runtime={"max_running_requests": 8})
    rows = {r: PROMPTS[1 + r % 3] for r in range(1, 9)}
    driver, caps = Driver(worker), {r: 0 if r < 5 else 1 if r < 8 else None for r in rows}
    driver.prefill(rows, sampling={r: structs.replace(GREEDY, speculative_num_steps=cap) for r, cap in caps.items()})
    seen = verified_tokens(worker, monkeypatch)
    results = [driver.decode(batch) for batch in ([*rows], [1, 2, 3, 4, 8], [5, 6, 7, 8], [1, 8], [8])]
    assert seen == [16, 16, 12, 8, 4], "two for each of 8, 8 and three for each of 4; too small for ragged graphs; one window"
    assert all(result.stats.graph for result in results)
    assert [max(result.stats.drafts, default=None) for result in results] == [3, 3, 3, None, None]


def test_a_batch_without_caps_runs_full_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = speculating(tmp_path, "EAGLE", num_steps=3)
    driver, seen = Driver(worker), verified_tokens(worker, monkeypatch)
    driver.prefill(PROMPTS)
    seen.clear()
    assert driver.decode([1, 2, 3]).stats.drafts == ()
    assert seen == [12]
    assert sum(runner.ran_eagerly for runner in worker.parts.verifier.ragged.values()) == 0


def test_prompts_beside_decoding_and_trees_keep_full_windows(tmp_path: Path) -> None:
    asks = {r: structs.replace(GREEDY, speculative_num_steps=c) for r, c in ((1, 0), (2, None), (3, 1))}
    mixing: Any = speculating(tmp_path, "EAGLE", num_steps=3, runtime={"mixed_chunk": True})
    driver = Driver(mixing)
    driver.prefill({r: PROMPTS[r] for r in (1, 2)}, sampling=asks)
    driver.prefill({3: PROMPTS[3]}, sampling=asks, along=lambda: [1, 2])
    assert driver.results[-1].stats.drafts == ()
    tree: Any = speculating(tmp_path, "EAGLE", topk=3, num_draft_tokens=7)
    assert tree.parts.verifier.ragged == {}
