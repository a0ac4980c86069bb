"""Guesses that are compared with tokens of steps without drafts, against drafts that are verified at the same positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.model_executor.depth_controller import DepthController, Observed
from runtime.model_executor.iteration_cost import CostPoint, IterationCost
from runtime.model_executor.row_acceptance import RowAcceptance
from runtime.sampling_params import SamplingParams
from runtime.speculative.catch_up import GUESS_EVERY, WIDTH
from unit.driver import GREEDY, Driver
from unit.predicting import VOCAB, speculating

DEPTHS = (3, 1, 0)
PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + r).tolist() for r in range(1, 6)}
MIXED = {r: SamplingParams(temperature=0.8, max_new_tokens=1 << 20) if r == 3 else GREEDY for r in PROMPTS}
FIRST = WIDTH + 1
"""The step without drafts before which the draft first catches up."""


class Recorder(DepthController):
    """Keeps what it is told of guesses."""

    def __init__(self, rows: RowAcceptance) -> None:
        super().__init__(DEPTHS, IterationCost([CostPoint(1, 0, 1e-3)]), rows=rows)
        self.seen: list[tuple[list[bool], list[bool]]] = []

    def observe_guesses(self, greedy: np.ndarray, hits: np.ndarray, copied: np.ndarray) -> None:
        self.seen.append((greedy.tolist(), hits.tolist()))
        super().observe_guesses(greedy, hits, copied)


def drafting(tmp_path: Path, algorithm: str = "EAGLE", replay: str | None = None, **spec: Any) -> tuple[Any, Recorder]:
    worker = speculating(tmp_path, algorithm, replay, [1, 2, 4, 8] if replay else None, depths=DEPTHS, **spec)
    worker.parts.depths.controller = recorder = Recorder(worker.parts.depths.rows)
    return worker, recorder


def run_without_drafts(worker: Any, steps: int, sampling: Any = GREEDY) -> Driver:
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling=sampling, room=120)
    with worker.parts.depths.forced(0):
        for _ in range(steps):
            driver.decode(list(PROMPTS))
    return driver


@pytest.mark.parametrize(
    ("algorithm", "replay", "synthetic"),
    [("EAGLE", None, None), ("EAGLE", "eager", None), ("EAGLE3", None, None), ("EAGLE", None, (0.5,) * 3), ("EAGLE", "eager", (0.5,) * 3)],
)
def test_guesses_hit_where_a_draft_would_be_accepted(
    tmp_path: Path, algorithm: str, replay: str | None, synthetic: tuple[float, ...] | None
) -> None:
    worker, recorder = drafting(tmp_path / "a", algorithm, replay, synthetic_accept=synthetic)
    run_without_drafts(worker, FIRST)
    ((greedy, hits),) = recorder.seen
    other, _ = drafting(tmp_path / "b", algorithm, replay, synthetic_accept=synthetic)
    driver = run_without_drafts(other, FIRST - 1)
    with other.parts.depths.forced(1):
        result = driver.decode(list(PROMPTS))
    assert all(greedy)
    assert hits == (result.accept_lens == 2).tolist()
    assert 0 < sum(hits) < len(hits), "some and not all"


def test_guesses_are_made_seldom_and_counted_by_kind(tmp_path: Path) -> None:
    worker, recorder = drafting(tmp_path)
    before = recorder.info()
    run_without_drafts(worker, FIRST + 2 * GUESS_EVERY * WIDTH, MIXED)
    assert len(recorder.seen) == 3
    assert all(greedy == [r != 3 for r in PROMPTS] for greedy, _ in recorder.seen)
    assert recorder.info().greedy.rates != before.greedy.rates
    assert recorder.info().sampled == before.sampled, "guesses say nothing about draws"


def test_synthetic_acceptance_holds_for_guesses(tmp_path: Path) -> None:
    for length, hit in (("4", True), ("1", False)):
        worker, recorder = drafting(tmp_path / length, synthetic_accept=(1.0,) * 3 if hit else (0.0,) * 3)
        run_without_drafts(worker, FIRST)
        assert [hits for _, hits in recorder.seen] == [[hit] * len(PROMPTS)]


def test_no_guesses_are_made_for_sampled_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, recorder = drafting(tmp_path)
    before, head = recorder.info(), list[int]()
    driver = run_without_drafts(worker, 0, SamplingParams(temperature=0.8, max_new_tokens=1 << 20))
    draft = worker.parts.drafter.model
    logits = draft.logits
    monkeypatch.setattr(draft, "logits", lambda hidden: head.append(len(hidden)) or logits(hidden))
    with worker.parts.depths.forced(0):
        for _ in range(FIRST + GUESS_EVERY * WIDTH):
            driver.decode(list(PROMPTS))
    after = recorder.info()
    assert recorder.seen == head == []
    assert (after.sampled, after.greedy) == (before.sampled, before.greedy)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "DFLASH", "NGRAM"])
def test_drafts_without_a_first_guess_are_compared_with_nothing(tmp_path: Path, algorithm: str) -> None:
    worker, recorder = drafting(tmp_path, algorithm)
    run_without_drafts(worker, FIRST)
    assert recorder.seen == []


def test_a_step_that_fails_does_not_stop_later_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, recorder = drafting(tmp_path)
    driver = run_without_drafts(worker, FIRST - 1)

    def fail(read: Observed) -> None:
        raise RuntimeError("the step fails")

    with worker.parts.depths.forced(0):
        with monkeypatch.context() as patch:
            patch.setattr(recorder, "observe", fail)
            with pytest.raises(RuntimeError):
                driver.decode(list(PROMPTS))
        for _ in range(GUESS_EVERY * WIDTH):
            driver.decode(list(PROMPTS), slack=1)
    assert len(recorder.seen) == 1
