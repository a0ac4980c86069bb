"""gpt-oss: logits against transformers in 32 bits and in MXFP4, and text with drafts, on several ranks and when KV is short."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.config.quant_config import QuantConfig
from runtime.errors import ConfigError
from runtime.models.config import ModelConfig, MoeConfig, RopeScaling
from runtime.models.registry import load_hf_config
from unit.driver import Driver
from unit.predicting import model_config, plain, speculating
from unit.ranks import ranks
from unit.test_models import LENGTH, PIECES, Checkpoint, Runner, assert_same_logits, loaded
from unit.test_served_speculation import CONTEXT, GREEDY, asked, prompts, serve
from unit.test_tensor_parallel import CHAIN, PROMPTS, TREE, builder, texts


def gpt_oss(inner: int = 48, **changes: Any) -> ModelConfig:
    """Three layers, of which the first and the last have windows of six keys."""
    moe = MoeConfig(
        num_experts=8, top_k=2, intermediate_size=inner, scoring="topk_softmax", renormalize=True, layers=(True,) * 3, bias=True
    )  # fmt: skip
    yarn = RopeScaling("yarn", 8.0, original_max_position=16, truncate=False, magnitude=1.2)
    parts = {"architecture": "GptOssForCausalLM", "qkv_bias": True, "o_bias": True, "sinks": True, "moe": moe, "rope_scaling": yarn}
    return model_config(**{**parts, "num_layers": 3, "window": (5, -1, 5), **changes})


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("pieces", PIECES)
def test_some_of_the_experts_give_the_logits_of_transformers(tmp_path: Path, pieces: str, page_size: int) -> None:
    reference = Checkpoint("gpt-oss", tmp_path, num_experts_per_tok=3)
    assert_same_logits(Runner(loaded(tmp_path), page_size).in_pieces(reference.ids, PIECES[pieces]), reference.logits)


def test_a_sink_takes_part_in_every_head(tmp_path: Path) -> None:
    reference = Checkpoint("gpt-oss", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith("sinks")]:
        weights[name] += torch.arange(len(weights[name])).to(weights[name].dtype)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference.reference.load_state_dict(weights)
    with torch.no_grad():
        expected = reference.reference(reference.ids[None]).logits[0]
    assert (expected - reference.logits).abs().max() > 0.1
    assert_same_logits(Runner(loaded(tmp_path), 16).in_pieces(reference.ids, PIECES["prefill"]), expected)


def to_mxfp4(reference: Checkpoint) -> torch.Tensor:
    """Store random MXFP4 experts in the checkpoint; the logits of transformers with what they stand for."""
    path, raw = reference.folder / "model.safetensors", json.loads((reference.folder / "config.json").read_text())
    weights, generator = load_file(path), torch.Generator().manual_seed(4)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights.pop(name).shape  # transformers holds [E, in, out]
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        reference.reference.get_parameter(name).data.copy_(exact)
    save_file(weights, path, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (reference.folder / "config.json").write_text(json.dumps(raw))
    with torch.no_grad():
        return reference.reference(reference.ids[None]).logits[0]


@pytest.mark.parametrize("pieces", PIECES)
def test_mxfp4_experts_give_the_logits_of_what_they_stand_for(tmp_path: Path, pieces: str) -> None:
    reference = Checkpoint("gpt-oss", tmp_path, num_experts_per_tok=3)
    expected = to_mxfp4(reference)
    assert_same_logits(Runner(loaded(tmp_path), 16).in_pieces(reference.ids, PIECES[pieces]), expected)


def test_a_missing_half_of_the_experts_is_named(tmp_path: Path) -> None:
    to_mxfp4(Checkpoint("gpt-oss", tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "0.mlp.experts.down_proj_scales" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight_scales"):
        loaded(tmp_path)


def test_what_the_file_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    raw = {"architectures": ["GptOssForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
           "num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_hf_config(tmp_path)
    assert (config.head_dim, config.window, config.rope_theta) == (64, (127, -1, 127), 150000.0)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor, config.rope_scaling.truncate) == ("yarn", 32.0, False)
    assert (config.qkv_bias, config.o_bias, config.sinks) == (True, True, True)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "swiglu_limit": 6.0}))
    with pytest.raises(ConfigError, match=r"swiglu_limit is 6\.0; only 7\.0 is supported"):
        load_hf_config(tmp_path)


MXFP4: dict[str, Any] = {"quant": QuantConfig("mxfp4", kept=("self_attn",)), "inner": 160}
"""Five groups of columns, which four ranks do not divide."""
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3": ("EAGLE3", CHAIN),
    "EAGLE-3 tree": ("EAGLE3", TREE),
    "standalone": ("STANDALONE", {"num_steps": 2, "num_draft_tokens": 3}),
    "ngram": ("NGRAM", CHAIN),
}


ROOMY: dict[str, Any] = {"context_length": CONTEXT, "max_running_requests": 8}


@functools.cache
def plain_text() -> dict[int, list[int]]:
    return Driver(plain(model=gpt_oss())).generate(PROMPTS, 32)


@functools.cache
def plain_served() -> dict[str, list[int]]:
    return serve(plain(model=gpt_oss(), **ROOMY), asked(GREEDY, prompts()), {}, radix_cache=False)[0]


@pytest.mark.parametrize("draft", ["EAGLE-3", "EAGLE-3 tree"])
def test_greedy_text_with_drafts_equals_plain_text_with_mxfp4_experts(tmp_path: Path, draft: str) -> None:
    model, (algorithm, shape) = gpt_oss(**{**MXFP4, "inner": 32}), DRAFTS[draft]
    driver = Driver(speculating(tmp_path, algorithm, model=model, **shape))
    assert driver.generate(PROMPTS, 20) == Driver(plain(model=model)).generate(PROMPTS, 20)
    assert driver.mean_accept_len() > 1.0, "drafts were accepted"


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_with_drafts_equals_plain_text(tmp_path: Path, draft: str, page_size: int) -> None:
    algorithm, shape = DRAFTS[draft]
    driver = Driver(speculating(tmp_path, algorithm, model=gpt_oss(), runtime={"page_size": page_size}, **shape))
    assert driver.generate(PROMPTS, 32) == plain_text()
    assert algorithm != "EAGLE3" or driver.mean_accept_len() > 1.1, "drafts were accepted"


@pytest.mark.parametrize(("size", "draft", "changes"), [(2, None, {}), (2, ("EAGLE3", CHAIN), {}), (4, None, {}), (4, None, MXFP4)])
def test_several_ranks_generate_the_text_of_one(tmp_path: Path, size: int, draft: Any, changes: dict[str, Any]) -> None:
    build = builder(tmp_path, draft, gpt_oss(**changes))
    expected, _ = texts(build())
    with ranks(size, build) as worker:
        assert texts(worker)[0] == expected
        assert not worker.parts.target.agreement.differs.item()


@pytest.mark.parametrize(("page", "algorithm"), [(1, "EAGLE3"), (16, "EAGLE3"), (64, "NGRAM"), (16, "STANDALONE")])
def test_text_survives_windows_behind_cached_prefixes_and_retraction(tmp_path: Path, page: int, algorithm: str) -> None:
    tight = {**ROOMY, "page_size": page, "max_total_tokens": 448 if page == 64 else 320}
    worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, model=gpt_oss(), num_steps=2)
    got, scheduler = serve(worker, asked(GREEDY, prompts()), {}, page_size=page, schedule_conservativeness=0.05)
    assert got == plain_served()
    assert scheduler.stats.num_retracted_requests_total > 0
    assert page == 64 or scheduler.stats.cached_tokens_total > 0
    assert scheduler.stats.spec.verify_steps > 0


def test_windows_are_shorter_than_the_texts() -> None:
    assert max(window for window in gpt_oss().window if window > 0) < min(LENGTH, CONTEXT, *(len(p) + 32 for p in PROMPTS.values()))
