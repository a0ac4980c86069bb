"""Workers of sparse models: greedy text with drafts equals plain text, and several ranks generate what one does."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config.quant_config import QuantConfig
from runtime.errors import ConfigError
from runtime.layers.moe.router import Router, Routing
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor import expert_counter
from runtime.model_executor.expert_counter import ExpertCounter
from runtime.models.config import ModelConfig, MoeConfig
from unit.driver import Driver
from unit.latent import latent_model
from unit.predicting import model_config, plain, speculating
from unit.ranks import Meeting, ThreadGroup, ranks
from unit.test_mtp import MOE
from unit.test_tensor_parallel import CHAIN, PROMPTS, TREE, builder, texts


def sparse_config(inner: int = 48, **changes: Any) -> ModelConfig:
    """A Qwen3-MoE of three layers, the first dense."""
    moe = MoeConfig(
        num_experts=8, top_k=2, intermediate_size=inner, scoring="softmax", renormalize=True, layers=(False, True, True)
    )  # fmt: skip
    return model_config(
        **{"architecture": "Qwen3MoeForCausalLM", "num_layers": 3, "window": (-1, -1, -1), "qk_norm": True, "moe": moe, **changes}
    )


def family(name: str, **changes: Any) -> ModelConfig:
    """A tiny model of one family."""
    base = sparse_config(qk_norm=False, **changes)
    assert base.moe is not None
    if name == "qwen3-moe":
        return sparse_config(**changes)
    if name == "qwen2-moe":
        moe = dataclasses.replace(base.moe, shared_intermediate_size=40)
        return dataclasses.replace(base, architecture="Qwen2MoeForCausalLM", qkv_bias=True, moe=moe)
    everywhere = dataclasses.replace(base.moe, layers=(True,) * 3)
    if name == "mixtral":
        return dataclasses.replace(base, architecture="MixtralForCausalLM", moe=everywhere)
    if name == "deepseek-v2":
        moe = dataclasses.replace(MOE, scoring="softmax", correction=False, renormalize=False, num_groups=4, top_groups=2, group_best=1)
        return latent_model(**{"architecture": "DeepseekV2ForCausalLM", "mtp": None, "moe": moe, **changes})
    if name == "exaone-moe":
        moe = dataclasses.replace(MOE, layers=base.moe.layers)
        return dataclasses.replace(base, architecture="ExaoneMoeForCausalLM", qk_norm=True, window=(5, 5, -1), unrotated=(2,), moe=moe)
    if name == "olmoe":
        return dataclasses.replace(base, architecture="OlmoeForCausalLM", qk_row_norm=True, moe=everywhere)
    if name == "hunyuan-moe":
        moe = dataclasses.replace(everywhere, shared_intermediate_size=base.moe.intermediate_size)
        return dataclasses.replace(base, architecture="HunYuanMoEV1ForCausalLM", qk_norm=True, norm_after_rope=True, moe=moe)
    if name == "ernie-moe":
        moe = dataclasses.replace(base.moe, correction=True, shared_intermediate_size=40)
        return dataclasses.replace(base, architecture="Ernie4_5_MoeForCausalLM", rope_interleaved=True, moe=moe)
    sigmoid = dataclasses.replace(everywhere, scoring="sigmoid", correction=True)
    return dataclasses.replace(base, architecture="MiniMaxM2ForCausalLM", moe=sigmoid, qk_row_norm=True, rotary_dim=8)


FAMILIES = ["qwen3-moe", "qwen2-moe", "mixtral", "minimax-m2", "olmoe", "hunyuan-moe", "ernie-moe", "exaone-moe", "deepseek-v2"]


QUANTISED = {"fp8": QuantConfig("fp8"), "fp8-row": QuantConfig("fp8", "row", "weight_scale")}


@functools.cache
def plain_text(name: str, quant: str | None) -> dict[int, list[int]]:
    return Driver(plain(model=family(name, quant=QUANTISED.get(quant or "")))).generate(PROMPTS, 20)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("name", "quant"), [*((name, None) for name in FAMILIES), *(("qwen3-moe", quant) for quant in QUANTISED)])
def test_greedy_text_with_eagle3_equals_plain_text(tmp_path: Path, name: str, quant: str | None, shape: dict[str, Any]) -> None:
    driver = Driver(speculating(tmp_path, "EAGLE3", model=family(name, quant=QUANTISED.get(quant or "")), **shape))
    assert driver.generate(PROMPTS, 20) == plain_text(name, quant)
    assert 1.1 < driver.mean_accept_len() < shape["num_steps"] + 1, "some drafts were accepted, and some were not"


@pytest.mark.parametrize(("name", "size", "draft"), [
    *[(name, 2, None) for name in FAMILIES], ("qwen3-moe", 2, ("EAGLE3", CHAIN)), ("qwen3-moe", 3, None), ("minimax-m2", 4, None),
])  # fmt: skip
def test_several_ranks_generate_the_text_of_one(tmp_path: Path, name: str, size: int, draft: Any) -> None:
    # Of four ranks two hold each KV head.
    heads = {2: {}, 3: {"num_q_heads": 6, "num_kv_heads": 3}, 4: {"num_q_heads": 4, "num_kv_heads": 2}}[size]
    build = builder(tmp_path, draft, family(name, **heads))
    expected, _ = texts(build())
    with ranks(size, build) as worker:
        assert texts(worker)[0] == expected
        assert not worker.parts.target.agreement.differs.item()


def test_ranks_that_quantize_on_load_generate_the_text_of_one(tmp_path: Path) -> None:
    build = builder(tmp_path, None, family("qwen2-moe", num_q_heads=4, num_kv_heads=2), quantization="fp8")
    expected, _ = texts(build())
    with ranks(4, build) as worker:
        assert worker.parts.target.runner.model.layers[1].mlp.experts.scheme.name == "fp8"
        assert texts(worker)[0] == expected


@pytest.mark.parametrize(("requests", "shape"), [(1, None), (3, None), (3, CHAIN)])
def test_distinct_experts_of_decode_passes_are_counted_without_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int, shape: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(expert_counter, "EVERY", 1)
    seen, route = list[list[set[int]]](), TorchOps.route

    def spy(ops: TorchOps, x: torch.Tensor, router: Router) -> Routing:
        routing = route(ops, x, router)
        seen.append([set(ids) for ids in routing.ids.tolist()])
        return routing

    monkeypatch.setattr(TorchOps, "route", spy)
    model = sparse_config()
    worker = plain(model=model) if shape is None else speculating(tmp_path, "EAGLE3", model=model, **shape)
    driver = Driver(worker)
    driver.generate(dict(list(PROMPTS.items())[:requests]), 2)
    assert (found := worker.info().distinct_experts) is not None
    tokens = requests * (1 if shape is None else shape["num_steps"] + 1)
    last = [set[int]().union(*layer[:tokens]) for layer in seen[-2:]]
    sample = worker.parts.experts.sample(tokens)
    assert sample is not None
    assert sample.tolist() == list(map(len, last))
    layers = worker.info().distinct_experts_by_layer
    assert len(layers) == len(last)
    assert sum(layers) / len(layers) == pytest.approx(found)
    assert 2 <= found <= min(8, 2 * tokens)
    if requests == 1 and shape is None:
        assert found == 2, "top_k, whatever padding chooses"


def test_a_shared_expert_in_the_stack_is_none_of_the_distinct_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_counter, "EVERY", 1)
    moe = dataclasses.replace(MOE, num_experts=32, num_groups=1)  # the shared one is alone in the last word of a mask
    found = list[dict[int, list[int]]]()
    for fused in (True, False):
        worker = plain(model=latent_model(moe=moe), fuse_shared_experts=fused)
        found.append(Driver(worker).generate({1: PROMPTS[1]}, 12))
        mlp = worker.parts.target.runner.model.sparse_mlps[0]
        assert (mlp.router.rule.shared, mlp.experts.count) == (fused, 32 + fused)
        assert worker.info().distinct_experts == moe.top_k
    assert found[0] == found[1]


def test_independence_is_counted_from_the_masks() -> None:
    counter = ExpertCounter(plain(model=sparse_config()).parts.target.runner.model.sparse_mlps)
    assert counter.by_layer == []
    counter.add(1, np.array([2, 2]))
    assert (counter.mean, counter.independence) == (2.0, None)
    counter.add(4, np.array([1, 3]))
    assert counter.independence == 0.0, "all tokens chose alike"
    counter.add(4, np.array([9, 7]))
    assert (counter.mean, counter.independence) == (4.0, 0.5)
    assert counter.by_layer == [4.0, 4.0]
    counter.add(1, np.array([4, 0]))
    assert (counter.mean, counter.by_layer) == (3.5, [4.0, 3.0])


@pytest.mark.parametrize("uncounted", [None, 1000])
def test_distinct_experts_of_an_earlier_load_are_forgotten(uncounted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_counter, "EVERY", 2)
    counter = ExpertCounter(plain(model=sparse_config()).parts.target.runner.model.sparse_mlps)
    counter.add(4, np.array([9, 7]))
    assert counter.sample(uncounted) is None
    assert (counter.mean, counter.by_layer, counter.independence) == (None, [], 1.0)
    counter.add(4, np.array([3, 3]))
    assert counter.sample(uncounted) is None
    assert counter.mean == 3.0, "only every second pass is due"


def test_a_reset_forgets_the_experts_of_earlier_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_counter, "EVERY", 1)
    worker = plain(model=sparse_config())
    Driver(worker).generate({1: PROMPTS[1]}, 4)
    worker.reset()
    assert (worker.info().distinct_experts, worker.parts.experts.independence) == (None, None)


def test_dense_models_have_no_distinct_experts() -> None:
    worker = plain()
    Driver(worker).generate(PROMPTS, 4)
    assert worker.info().distinct_experts is None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_quantized_on_load_are_shared_too(tmp_path: Path, quantization: str) -> None:
    build = builder(tmp_path, None, sparse_config(hidden_size=64, inner=64), quantization=quantization)
    expected, _ = texts(build())
    with ranks(2, build) as worker:
        assert texts(worker)[0] == expected


@pytest.mark.parametrize(("size", "ep_size", "held", "inner"), [(2, 1, 9, 16), (2, 2, 4, 32), (4, 2, 4, 16)])
def test_ranks_with_a_shared_expert_generate_the_text_of_one(tmp_path: Path, size: int, ep_size: int, held: int, inner: int) -> None:
    model = latent_model(moe=MOE)
    expected, _ = texts(builder(tmp_path, None, model)())
    with ranks(size, builder(tmp_path, None, model, ep_size=ep_size)) as worker:
        mlp = worker.parts.target.runner.model.sparse_mlps[0]
        assert (mlp.experts.count, mlp.experts.size, mlp.router.rule.shared) == (held, (64, inner), ep_size == 1)
        assert texts(worker)[0] == expected


@pytest.mark.parametrize(("size", "ep_size", "name"), [(2, 2, "qwen3-moe"), (2, 2, "qwen2-moe"), (4, 2, "mixtral"), (4, 4, "qwen3-moe")])
def test_experts_placed_on_ranks_generate_the_text_of_one_rank(tmp_path: Path, size: int, ep_size: int, name: str) -> None:
    model = family(name)
    expected, _ = texts(builder(tmp_path, None, model)())
    with ranks(size, builder(tmp_path, None, model, ep_size=ep_size)) as worker:
        experts = worker.parts.target.runner.model.sparse_mlps[0].experts
        assert (experts.count, experts.size) == (8 // ep_size, (64, 48 * ep_size // size))
        assert texts(worker)[0] == expected


def test_experts_that_cannot_be_placed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ep-size 3: Qwen3MoeForCausalLM has 8 experts; use a divisor"):
        builder(tmp_path, None, sparse_config(), ep_size=3)(group=ThreadGroup(0, 3, Meeting(3)))
    with pytest.raises(ConfigError, match="--ep-size 2: LlamaForCausalLM has no experts"):
        builder(tmp_path, None, model_config(), ep_size=2)(group=ThreadGroup(0, 2, Meeting(2)))
