"""Drafts from a token map, and trees with fewer nodes than steps, on the GPU: replay equals eager bitwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.test_worker import PROMPTS, SAMPLED, Setup, build
from runtime.config.runtime_config import SpeculativeConfig
from runtime.sampling_params import SamplingParams
from unit.driver import GREEDY, Driver
from unit.predicting import draft_folder
from unit.tiny import tiny_speculative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = dict(vocab_size=1000, hidden_size=256, intermediate_size=512, head_dim=64, torch_dtype="bfloat16")
HOT = range(0, 1000, 2)


def drafting(tmp_path: Path, algorithm: str, **changes: object) -> SpeculativeConfig:
    folder = draft_folder(tmp_path / "draft", algorithm, 3, **SHAPE)
    return tiny_speculative(folder, algorithm=algorithm, attention_backend="fa3", **changes)


def accept_lens(spec: SpeculativeConfig, sampling: SamplingParams) -> np.ndarray:
    """Accept lengths of a run through graphs. An eager run has the same ones, and the same tokens."""
    found = []
    for replay in ("eager", "cuda"):
        driver = Driver(build(Setup("fa3", "fa3"), replay, spec))
        found.append((driver.generate(PROMPTS, 40, sampling=sampling), np.concatenate(driver.accepts).tolist()))
    assert found[0] == found[1]
    return np.array(found[0][1])


@pytest.mark.parametrize(("algorithm", "topk", "tokens"), [("EAGLE", 1, 4), ("EAGLE", 4, 8), ("STANDALONE", 1, 4), ("DFLASH", 1, 4)])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_from_a_token_map_are_those_of_an_eager_run(
    tmp_path: Path, algorithm: str, topk: int, tokens: int, sampling: SamplingParams
) -> None:
    torch.save(list(HOT), tmp_path / "hot.pt")
    spec = drafting(tmp_path, algorithm, topk=topk, num_draft_tokens=tokens, token_map=str(tmp_path / "hot.pt"))
    lens = accept_lens(spec, sampling)
    if algorithm == "STANDALONE" and sampling == GREEDY:  # a copy of the target, of which about half of the tokens are in the map
        assert 1.3 < lens.mean() < 3


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(5, 4, 4), (6, 2, 5)])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_with_fewer_nodes_than_steps_is_that_of_an_eager_run(
    tmp_path: Path, steps: int, topk: int, tokens: int, sampling: SamplingParams
) -> None:
    spec = drafting(tmp_path, "EAGLE", num_steps=steps, topk=topk, num_draft_tokens=tokens)
    assert accept_lens(spec, sampling).max() <= tokens
