"""A KV cache in 8 bits: what is stored, what is read, and text with drafts."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.shapes import CONFIGS
from small_tokenizer import write_small_tokenizer

from runtime.batch import ForwardMode
from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.errors import ConfigError
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import RotaryHeads
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.kv_pool import KVPool
from runtime.mem_cache.kv_spec import KVSpec
from runtime.model_executor.weight_loader import dummy_weights
from runtime.models.decoder import DecoderModel
from runtime.models.registry import build_model
from unit.latent import latent_model
from unit.predicting import plain, speculating
from unit.test_models import EXTEND, PIECES, Runner
from unit.test_served_speculation import CONTEXT, GREEDY, asked, prompts, serve
from unit.tiny import tiny_model

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
VERIFY = ForwardMode.TARGET_VERIFY


def model(kv_dtype: torch.dtype | None, scales: dict[str, torch.Tensor] | None = None, ops: TorchOps | None = None) -> DecoderModel:
    made = build_model(tiny_model(qk_norm=True), ops or TorchOps(), torch.float32, CPU, kv_dtype=kv_dtype)
    weights = dict(dummy_weights(made.expected_weights(), torch.float32, CPU, 7))
    for name in weights:
        if name.endswith("proj.weight"):
            weights[name] *= 10
    made.load([*weights.items(), *(scales or {}).items()])
    return made


def test_a_token_takes_one_byte_for_each_number() -> None:
    specs = model(E4M3).attention_specs
    assert {spec.kv.bytes_per_slot for spec in specs} == {2 * 2 * 16}
    assert {spec.kv.bytes_per_slot for spec in model(None).attention_specs} == {2 * 2 * 16 * 4}


@pytest.mark.parametrize("name", ["{}_scale", "{}_proj.{}_scale"])
def test_stored_keys_and_values_are_those_of_a_wide_cache_rounded_by_their_scales(name: str) -> None:
    scales = {f"model.layers.0.self_attn.{name.format(part, part)}": torch.tensor([value]) for part, value in (("k", 0.004), ("v", 0.5))}
    narrow, wide = Runner(model(E4M3, scales), 16), Runner(model(None, scales), 16)
    ids = torch.arange(40)
    for runner in (narrow, wide):
        runner.logits(ids, 0, EXTEND)
    rows = torch.full((40,), 2)
    slots = narrow.table.slots(rows, torch.arange(40))
    for part, scale in ((0, 0.004), (1, 0.5)):
        stored, exact = (runner.model._bound[0].flat(0)[part] for runner in (narrow, wide))  # type: ignore[index]
        assert stored.dtype is E4M3
        expected = (exact[slots] / scale).clamp(-448, 448).to(E4M3).float()
        assert torch.equal(stored.view(torch.uint8)[slots].view(E4M3).float(), expected)
        if part == 0:
            assert expected.abs().max() == 448, "keys beyond the largest number are clamped, not NaN"


def test_keys_and_values_may_have_one_scale_together() -> None:
    together = {"model.layers.0.self_attn.kv_scale": torch.tensor(0.25)}
    assert model(None, together).attention_specs[0].kv_scales is None
    scales = model(E4M3, together).attention_specs[0].kv_scales
    assert scales is not None
    assert scales.tolist() == [0.25, 0.25]


class RoundedOps(TorchOps):
    """Writes keys and values that are rounded to 8 bits into a wide cache."""

    def rope_and_cache(self, qkv: torch.Tensor, heads: RotaryHeads, layer_id: int, context: PassContext) -> torch.Tensor:
        q = super().rope_and_cache(qkv, heads, layer_id, context)
        for cache in context.kv_pool.flat(layer_id):
            slots = context.batch.out_cache_loc
            cache[slots] = cache[slots].clamp(-448, 448).to(E4M3).float()
        return q


@pytest.mark.parametrize("pieces", PIECES)
def test_logits_are_those_of_rounded_keys_and_values(pieces: str) -> None:
    ids = torch.arange(40)
    expected = Runner(model(None, ops=RoundedOps()), 16).in_pieces(ids, PIECES["prefill"])
    exact = Runner(model(None), 16).in_pieces(ids, PIECES["prefill"])
    assert float((expected - exact).norm() / exact.norm()) > 1e-3, "rounding matters here"
    torch.testing.assert_close(Runner(model(E4M3), 1).in_pieces(ids, PIECES[pieces]), expected, rtol=1e-4, atol=1e-4)


def test_slots_move_bit_for_bit() -> None:
    pool = KVPool([KVSpec("gqa", 2, 4, 4, E4M3, scaled=True)], 4, 2, CPU)
    for cache in (*pool.k, *pool.v):
        cache.view(torch.uint8).copy_(torch.randint(0, 255, cache.shape))
    before = [cache.view(torch.uint8).flatten(0, 1).clone() for cache in (*pool.k, *pool.v)]
    pool.move(torch.tensor([5, 7]), torch.tensor([3, 4]), 2)
    for cache, old in zip((*pool.k, *pool.v), before, strict=True):
        now = cache.view(torch.uint8).flatten(0, 1)
        assert torch.equal(now[3:5], old[[5, 7]])


WORKERS: list[tuple[str, dict[str, Any]]] = [
    ("EAGLE", {}), ("EAGLE", {"topk": 3, "num_draft_tokens": 7}), ("EAGLE3", {"num_steps": 2}), ("NGRAM", {}),
]  # fmt: skip
ROOMY: dict[str, Any] = {"context_length": CONTEXT, "max_running_requests": 8, "kv_cache_dtype": "fp8_e4m3"}


@functools.cache
def plain_texts() -> dict[str, list[int]]:
    return serve(plain(**ROOMY), asked(GREEDY, prompts()), {}, radix_cache=False)[0]


@pytest.mark.parametrize(("algorithm", "spec"), WORKERS)
@pytest.mark.parametrize("page", [1, 16])
def test_greedy_text_with_drafts_is_the_plain_workers_with_the_same_cache(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], page: int
) -> None:
    tight = {**ROOMY, "page_size": page, "max_total_tokens": 320}
    worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, **spec)
    got, scheduler = serve(worker, asked(GREEDY, prompts()), {}, page_size=page, schedule_conservativeness=0.05)
    assert got == plain_texts()
    assert scheduler.stats.num_retracted_requests_total > 0
    assert scheduler.stats.cached_tokens_total > 0


def test_a_target_with_latent_attention_refuses_it_before_loading(tmp_path: Path) -> None:
    shutil.copy(CONFIGS / "deepseek-v3" / "config.json", tmp_path)
    write_small_tokenizer(tmp_path)
    flags = ["--model-path", str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--kv-cache-dtype", "fp8_e4m3"]
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM stores latent rows, in the model's dtype only"):
        prepare(parse(flags).args)


def test_a_draft_with_latent_attention_has_a_cache_in_its_dtype() -> None:
    model = build_model(latent_model(), TorchOps(), torch.float32, CPU, kv_dtype=E4M3)
    assert {(spec.kv.kind, spec.kv.dtype, spec.kv.scaled) for spec in model.attention_specs} == {("mla", torch.float32, False)}
