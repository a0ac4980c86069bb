"""Workers of sparse models: greedy text with drafts equals plain text, and several ranks generate what one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.models.config import ModelConfig, MoeConfig
from unit.driver import Driver
from unit.predicting import model_config, plain, speculating
from unit.ranks import ranks
from unit.test_tensor_parallel import CHAIN, PROMPTS, TREE, builder, texts


def sparse_config(**changes: Any) -> ModelConfig:
    """A Qwen3-MoE of three layers, the first dense."""
    moe = MoeConfig(
        num_experts=8, top_k=2, intermediate_size=48, scoring="softmax", renormalize=True, layers=(False, True, True)
    )  # fmt: skip
    return model_config(**{"architecture": "Qwen3MoeForCausalLM", "qk_norm": True, "moe": moe, **changes})


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_text_with_eagle3_equals_plain_text(tmp_path: Path, shape: dict[str, Any]) -> None:
    expected = Driver(plain(model=sparse_config())).generate(PROMPTS, 32)
    worker = speculating(tmp_path, "EAGLE3", model=sparse_config(), **shape)
    driver = Driver(worker)
    assert driver.generate(PROMPTS, 32) == expected
    assert driver.mean_accept_len() > 1.1, "drafts were accepted"


@pytest.mark.parametrize(("size", "draft"), [(2, None), (2, ("EAGLE3", CHAIN)), (3, None)])
def test_several_ranks_generate_the_text_of_one(tmp_path: Path, size: int, draft: Any) -> None:
    heads = {"num_q_heads": 6, "num_kv_heads": 3} if size == 3 else {}
    build = builder(tmp_path, draft, sparse_config(**heads))
    expected, _ = texts(build())
    with ranks(size, build) as worker:
        assert texts(worker)[0] == expected
        assert not worker.parts.target.agreement.differs.item()


def test_int8_experts_are_shared_too(tmp_path: Path) -> None:
    build = builder(tmp_path, None, sparse_config(hidden_size=64), quantization="int8")
    expected, _ = texts(build())
    with ranks(2, build) as worker:
        assert texts(worker)[0] == expected
