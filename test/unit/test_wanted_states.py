"""Prompt passes compute the last layer only for tokens whose states are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams
from unit.driver import Driver
from unit.predicting import VOCAB, model_config, plain, speculating

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 3)}
WARM = SamplingParams(temperature=0.9)
READERS = ("EAGLE",)
"""Drafters that read the last hidden state of every token."""
OTHERS = (None, "EAGLE3", "STANDALONE", "DFLASH", "NGRAM")


def build(tmp_path: Path, algorithm: str | None) -> Any:
    """With enough layers that EAGLE-3 does not read the output of the last one."""
    model = model_config(num_layers=7, window=(-1,) * 7)
    return plain(model=model) if algorithm is None else speculating(tmp_path, algorithm, model=model)


def watch(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number of wanted tokens of each prompt pass of the target from now on; None for all."""
    runner, seen = worker.parts.target.runner, list[int | None]()
    extend = runner.extend

    def watched(batch: Any, aux: tuple[int, ...] = (), wanted: torch.Tensor | None = None) -> Any:
        seen.append(None if wanted is None else len(wanted))
        return extend(batch, aux, wanted)

    monkeypatch.setattr(runner, "extend", watched)
    return seen


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("algorithm", [*READERS, *OTHERS], ids=str)
def test_text_is_that_of_passes_over_all_tokens(
    tmp_path: Path, algorithm: str | None, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = []
    for everything in (False, True):
        worker = build(tmp_path / str(everything), algorithm)
        if everything:
            worker.parts.target._reads_hidden = True
        seen = watch(worker, monkeypatch)
        drivers.append(Driver(worker))
        drivers[-1].generate(PROMPTS, 20, sampling=sampling, chunk=5)
        assert (set(seen) == {None}) == (everything or algorithm in READERS)
    assert drivers[0].out == drivers[1].out
    assert all((a == b).all() for a, b in zip(*(driver.accepts for driver in drivers), strict=True))


def test_chunks_before_the_last_want_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = build(tmp_path, None)
    seen = watch(worker, monkeypatch)
    Driver(worker).prefill({1: list(range(17))}, chunk=5)
    assert seen == [0, 0, 0, 1]
    Driver(worker).prefill({2: list(range(7)), 3: list(range(12))}, chunk=6)
    assert seen[4:] == [0, 2], "the last token of each chunk, if one of them ends a prompt"


def test_log_probabilities_of_the_prompt_need_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = build(tmp_path, None)
    seen = watch(worker, monkeypatch)
    (result,) = Driver(worker).prefill({1: PROMPTS[1]}, prompt_logprobs=True, logprobs=2)
    assert seen == [None]
    assert result.prompt_logprobs[0].chosen.shape == (len(PROMPTS[1]),)


@pytest.mark.parametrize(("kind", "wanted"), [("mean", None), ("last", 1), ("labels", 1)])
def test_pooled_states_are_those_of_all_tokens(tmp_path: Path, kind: Any, wanted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for everything in (False, True):
        worker = build(tmp_path, None)
        worker.parts.target._reads_hidden = everything
        seen = watch(worker, monkeypatch)
        pooling = Pooling(kind=kind, label_ids=(3, 5) if kind == "labels" else ())
        (result,) = Driver(worker).prefill({1: PROMPTS[3]}, pooling={1: pooling})
        assert seen == [None if everything else wanted]
        found.append(result.pooled[0])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_log_probabilities_after_prompts_are_those_of_all_tokens(tmp_path: Path) -> None:
    found = []
    for everything in (False, True):
        worker = build(tmp_path, None)
        worker.parts.target._reads_hidden = everything
        found.append(Driver(worker).prefill(PROMPTS, logprobs=3, chunk=6))
    for one, other in zip(*found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        if len(one.token_ids):
            np.testing.assert_allclose(one.logprobs.chosen, other.logprobs.chosen, rtol=1e-5, atol=1e-5)
            assert one.logprobs.top_ids.tolist() == other.logprobs.top_ids.tolist()
