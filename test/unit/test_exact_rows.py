"""With int8 and int4 weights on a CPU, a request's keys and values have the same bits beside any others, in chunks and with drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config.quant_config import Int4Format, QuantConfig
from runtime.models.config import LatentConfig, ModelConfig
from unit.driver import Driver
from unit.latent import latent_model
from unit.test_gpt_oss import gpt_oss
from unit.test_mtp import MOE
from unit.test_sparse_workers import family
from unit.test_tensor_parallel import CHAIN, builder


def gated_model() -> ModelConfig:
    """A Qwen2-MoE whose widths int4 can divide."""
    model = family("qwen2-moe", inner=64)
    assert model.moe is not None
    return replace(model, moe=replace(model.moe, shared_intermediate_size=64))


MODELS: dict[str, ModelConfig] = {
    "latent attention": latent_model(moe=MOE, latent=LatentConfig(64, kv_rank=128, nope_dim=64, value_dim=32, scale=72**-0.5)),
    "sinks": gpt_oss(inner=64),
    "shared expert with a gate": gated_model(),
}
LENGTHS = (70, 3, 5, 40, 23, 1, 33, 9, 51, 16, 2, 64)
PROMPTS = {row: np.random.default_rng(row).integers(3, 90, size=n).tolist() for row, n in enumerate(LENGTHS, 1)}
TOKENS = 8
Answer = tuple[list[int], torch.Tensor]


def answers(worker: Any, rows: list[int], **prefill: Any) -> dict[int, Answer]:
    """Greedy tokens of some prompts, and the KV of their prompts and of all tokens but the last."""
    driver, pool = Driver(worker), worker.parts.target.runner.kv_pool
    texts = driver.generate({row: PROMPTS[row] for row in rows}, TOKENS, **prefill)

    def cached(row: int) -> torch.Tensor:
        slots = torch.from_numpy(driver.slots(row, len(PROMPTS[row]) + TOKENS - 1))
        return torch.cat([cache[slots].flatten(1) for layer in range(len(pool.k)) for cache in pool.flat(layer)], dim=1)

    return {row: (text, cached(row)) for row, text in texts.items()}


@pytest.mark.parametrize("weights", ["int8", "int4", "awq", "gptq"])
@pytest.mark.parametrize("name", MODELS)
def test_a_request_does_not_depend_on_others_or_drafts(tmp_path: Path, name: str, weights: str) -> None:
    group = 32 if name == "latent attention" else 64  # which divides the widths of the others
    stored = QuantConfig("int4", int4=Int4Format("awq" if weights == "awq" else "gptq", group))
    model, quantization = (MODELS[name], weights) if weights.startswith("int") else (replace(MODELS[name], quant=stored), "int4")
    plain = builder(tmp_path, None, model, quantization)()
    drafting = builder(tmp_path, ("EAGLE3", CHAIN), model, quantization)()
    alone = {row: answers(plain, [row])[row] for row in PROMPTS}
    for worker in (plain, drafting):
        for chunk in (1 << 30, 7):
            for row, (text, cached) in answers(worker, [*PROMPTS], chunk=chunk).items():
                assert text == alone[row][0], (row, chunk)
                assert torch.equal(cached, alone[row][1]), (row, chunk)
