"""Greedy text with EAGLE-3 heads of every published layout is that of the target alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unit.driver import Driver
from unit.predicting import VOCAB, plain, speculating, three_layers


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


LAYOUTS: dict[str, dict[str, Any]] = {
    "states normed together": {"norm_before_fc": True},
    "states normed apart": {"fc_norm": True},
    "normed residual": {"norm_before_residual": True},
    "normed states fed back": {"norm_output": True},
    "all within eagle_config": {
        "eagle_config": {"norm_before_fc": True, "use_aux_norm": True, "norm_before_residual": True, "norm_output": True}
    },
    "the target's last state": {"eagle_config": {"use_aux_hidden_state": False}},
    "Qwen3's layer": {"transformer_layer_config": {"model_type": "qwen3"}},
    "two layers": {"num_hidden_layers": 2},
    "vLLM's class": {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 64},
}
WINDOWS: dict[str, dict[str, int]] = {"chain": {"num_steps": 3}, "tree": {"num_steps": 3, "topk": 4, "num_draft_tokens": 6}}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_text_is_the_targets(tmp_path: Path, layout: str, window: str) -> None:
    rng = np.random.default_rng(5)
    prompts = {row: rng.integers(0, VOCAB, size).tolist() for row, size in ((1, 9), (2, 30), (3, 17))}
    expected = Driver(plain(model=three_layers())).generate(prompts, 24)
    worker = speculating(tmp_path, "EAGLE3", model=three_layers(), head=LAYOUTS[layout], **WINDOWS[window])
    driver = Driver(worker)
    assert driver.generate(prompts, 24) == expected
    assert driver.step < 24, "no draft was accepted"
