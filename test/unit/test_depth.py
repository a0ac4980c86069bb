"""Draft depth is a number: the table of depths, the chooser, and workers that change depth at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.model_executor import build
from runtime.model_executor.depth import DepthBatches, DepthControl, choose_depth, split_batch_sizes
from runtime.sampling_params import SamplingParams
from unit.driver import Driver
from unit.predicting import VOCAB, plain, speculating

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 3)}


def test_the_deepest_depth_that_serves_the_batch_is_chosen() -> None:
    limits = {7: 2, 3: 8, 1: 32, 0: 256}
    assert [choose_depth(size, limits) for size in (1, 2, 3, 8, 9, 32, 33, 256)] == [7, 7, 3, 3, 1, 1, 0, 0]


def test_without_a_limit_the_table_has_one_depth() -> None:
    assert split_batch_sizes(3, None, 8, [1, 2, 4], True) == {3: DepthBatches(8, 8, [1, 2, 4], [1, 2, 4])}
    assert split_batch_sizes(0, None, 8, [], True) == {0: DepthBatches(8, 8, [], [1, 8])}


def test_larger_batches_run_at_depth_0() -> None:
    table = split_batch_sizes(3, 4, 16, [1, 2, 8, 16], True)
    assert table == {3: DepthBatches(4, 8, [1, 2, 8], [1, 2, 8]), 0: DepthBatches(16, 16, [8, 16], [8, 16])}


def test_a_forced_depth_ends_with_its_context() -> None:
    control = DepthControl({3: 4, 0: 16})
    with control.forced(0):
        assert control.choose(1) == 0
    assert (control.choose(1), control.choose(5), control.deepest) == (3, 0, 3)
    with pytest.raises(AssertionError, match="was not built"), control.forced(2):
        pass


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("replay", [None, "eager"])
def test_text_does_not_depend_on_the_depth_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, replay: str | None
) -> None:
    """A table of more depths is the only change: drafter, verification and acceptance take any of them."""
    samplings = {1: SamplingParams(temperature=0.0), 2: SamplingParams(temperature=0.0, repetition_penalty=1.3), 3: SamplingParams()}
    expected = Driver(plain()).generate(PROMPTS, 24, sampling=samplings)
    sizes = [2, 4] if replay else []
    table = {depth: DepthBatches(40, 40, sizes, sizes) for depth in (5, 3, 2, 1, 0)}
    monkeypatch.setattr(build, "make_depths", lambda *args: table)
    worker: Any = speculating(tmp_path, algorithm, replay, sizes, num_steps=5)
    assert worker.parts.depths.choose(3) == 5
    driver, used = Driver(worker), set[int]()
    driver.prefill(PROMPTS, sampling=samplings, room=160)
    for step in range(24):
        depth = (5, 0, 2, 1, 3)[step % 5]
        with worker.parts.depths.forced(depth):
            result = driver.decode(list(PROMPTS))
        assert result.stats.draft_tokens == depth
        used.update(result.accept_lens[:2].tolist())
    assert all(driver.out[row][:24] == expected[row] for row in (1, 2))
    assert max(used) > 1
    if replay:
        assert all(runner.replayed for runner in worker.runners)
    assert worker.parts.monitor.counted().drafted[0] == 24 // 5 * 4 * 3 + 3 * 3
