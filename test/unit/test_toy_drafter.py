"""Adding a drafter takes one class, and one row of the registry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.model_executor.build import build_worker
from runtime.model_executor.context import BuildOptions
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.drafter import Drafter, DrafterSpec, DraftSetup
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.target_model import TargetModel
from runtime.sampling_params import SamplingParams
from runtime.speculative.registry import DRAFTERS, make_drafter
from unit.driver import Driver
from unit.predicting import RUNTIME, VOCAB, calm, model_config, plain
from unit.tiny import tiny_runtime, tiny_speculative

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 5 + r).tolist() for r in (1, 2, 3)}


class RepeatDrafter(Drafter):
    """Drafts the last token K times."""

    def __init__(self, num_steps: int) -> None:
        self.spec = DrafterSpec(TreeShape(num_steps, 1, num_steps + 1))
        self._target: TargetModel

    def attach(self, setup: DraftSetup) -> None:
        self._target = setup.target

    def propose(self, iteration: Iteration) -> DraftWindow:
        return DraftWindow(iteration.no_drafts.tokens.repeat(1, iteration.depth + 1))


@pytest.mark.parametrize("replay", [None, "eager"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_toy_drafter_serves_the_text_of_plain_decoding(replay: str | None, mixed: bool) -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias={7: 9.0}, max_new_tokens=1 << 20)  # repeats a token often
    config = tiny_runtime(**{**RUNTIME, "mixed_chunk": mixed})
    options = BuildOptions(replay, [2, 4] if replay else None)
    worker = build_worker(config, model_config(), lambda context, target: RepeatDrafter(3), options)
    with torch.inference_mode():
        calm(worker.parts.target.runner.model, 1.0)
    expected = Driver(plain()).generate(PROMPTS, 30, sampling=sampling)
    driver = Driver(worker)
    driver.prefill({1: PROMPTS[1]}, sampling=sampling, chunk=4)
    driver.prefill({row: PROMPTS[row] for row in (2, 3)}, sampling=sampling, chunk=4, along=lambda: [1])
    while any(len(driver.out[row]) < 30 for row in PROMPTS):
        driver.decode([row for row in PROMPTS if len(driver.out[row]) < 30])
    assert {row: text[:30] for row, text in driver.out.items()} == expected
    assert driver.mean_accept_len() > 1.2
    acceptance = worker.info().acceptance
    assert acceptance is not None
    assert acceptance.graph.iterations + acceptance.eager.iterations == sum(len(lens) for lens in driver.accepts)


def test_a_row_of_the_registry_serves_the_toy_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "NGRAM", lambda context, target: RepeatDrafter(context.speculative.num_steps))
    config = tiny_runtime(tiny_speculative("", algorithm="NGRAM", num_steps=2, num_draft_tokens=3), **RUNTIME)
    worker = build_worker(config, model_config(), make_drafter)
    with torch.inference_mode():
        calm(worker.parts.target.runner.model, 1.0)
    assert isinstance(worker.parts.drafter, RepeatDrafter)
    assert Driver(worker).generate(PROMPTS, 12) == Driver(plain()).generate(PROMPTS, 12)
