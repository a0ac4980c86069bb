"""Qwen 3.5 and Qwen3-Next: long prompts, published forms of their tensors, several ranks, and files that are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.errors import ConfigError
from runtime.layers.linear import Linear
from runtime.layers.sparse_mlp import SparseMlp
from runtime.layers.torch_ops import TorchOps
from runtime.models.block import Block
from runtime.models.config import DeltaConfig, ModelConfig, MoeConfig
from runtime.models.decoder import DecoderModel
from runtime.models.delta_fields import MTP
from runtime.models.registry import load_hf_config, parse_hf_config
from unit import predicting, test_models, test_mtp
from unit.driver import Driver
from unit.int4_files import FORMS, SHUFFLED_FORMS, packed, write_int4
from unit.predicting import VOCAB
from unit.ranks import Meeting, ThreadGroup, ranks
from unit.small_tokenizer import write_small_tokenizer
from unit.test_models import COMMON, DECODE, DELTA, EXPERTS, EXTEND, SHARED_EXPERT, SPARSE, VERIFY, Checkpoint, Runner, loaded
from unit.test_tensor_parallel import CHAIN, PROMPTS, builder, texts
from unit.tiny import tiny_model

QWEN = ["qwen3.5", "qwen3.5-moe", "qwen3-next"]
RAW: dict[str, Any] = {**COMMON, **DELTA, "architectures": ["Qwen3_5ForCausalLM"]}
SPARSE_RAW: dict[str, Any] = {**SPARSE, **DELTA, **EXPERTS, **SHARED_EXPERT, "architectures": ["Qwen3NextForCausalLM"]}


def test_a_gate_gives_a_row_the_same_bits_in_every_batch() -> None:
    x, gate = torch.randn(7, 12), torch.randn(7, 12)
    together = TorchOps().gate(x.clone(), gate)
    torch.testing.assert_close(together, x * gate.sigmoid())
    for i in range(7):
        assert torch.equal(TorchOps().gate(x[i : i + 1].clone(), gate[i : i + 1]), together[i : i + 1])
    assert torch.equal(TorchOps().gate(torch.ones(1, 2), torch.tensor([[-200.0, 200.0]])), torch.tensor([[0.0, 1.0]]))


# ---- logits


def long_logits(reference: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference.reference(ids[None]).logits[0]


LONG = 120
LONG_PIECES = {
    "prefill and decode": [(100, EXTEND), *[(1, DECODE)] * 20],
    "chunks": [(70, EXTEND), (1, EXTEND), (3, EXTEND), (46, EXTEND)],
    "windows": [(72, EXTEND), *[(4, VERIFY)] * 12],
}


@pytest.mark.parametrize("pieces", LONG_PIECES)
@pytest.mark.parametrize("name", QWEN)
def test_prompts_of_several_chunks_match_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pieces: str) -> None:
    monkeypatch.setattr(test_models, "MAX_LEN", 128)
    reference = Checkpoint(name, tmp_path)
    ids = torch.randint(0, 101, (LONG,), generator=torch.Generator().manual_seed(1))
    expected = long_logits(reference, ids)
    logits = Runner(loaded(tmp_path), 16).in_pieces(ids, LONG_PIECES[pieces])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.abs().max())))
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", QWEN)
def test_a_batch_of_windows_has_the_bits_of_decoding_in_int8(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 128, "num_experts": 16, "shared_expert_intermediate_size": 64}
    reference = Checkpoint(name, tmp_path, **sizes, initializer_range=0.05)
    model = loaded(tmp_path, "int8")
    alone = Runner(model, 16).in_pieces(reference.ids, [(20, EXTEND), *[(1, DECODE)] * 20])[20:]
    for width in (2, 4):
        pieces = [(20, EXTEND), *[(width, VERIFY)] * (20 // width)]
        assert torch.equal(Runner(model, 16).in_pieces(reference.ids, pieces)[20:], alone), width


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_biases_of_attention_match_transformers(tmp_path: Path, name: str) -> None:
    reference = Checkpoint(name, tmp_path, attention_bias=True)
    reference.check([(13, EXTEND), (27, EXTEND)])


@pytest.mark.parametrize(("given", "rotated"), [({}, 4), ({"partial_rotary_factor": None}, None), ({"partial_rotary_factor": 0.5}, 8)])
def test_the_rotated_share_of_heads_is_that_of_transformers(given: dict[str, Any], rotated: int | None) -> None:
    raw = {**RAW, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **given}
    assert parse_hf_config(raw, "config.json").rotary_dim == rotated
    rotary = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**copy.deepcopy(raw)))
    assert 2 * len(rotary.inv_freq) == (rotated or RAW["head_dim"])


# ---- tensors


def test_stacked_experts_as_published_match_transformers(tmp_path: Path) -> None:
    reference = Checkpoint("qwen3.5-moe", tmp_path)
    reference.reference.save_pretrained(tmp_path, save_original_format=False)
    assert load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 64)
    reference.check()


def first_layers(model: DecoderModel) -> list[Linear]:
    """The linear layers of the first layer's attention: queries, keys, values and output gates; rates and decays; output."""
    block = model.layers[0]
    assert isinstance(block, Block)
    assert block.attn_norm is not None
    return [gemm.linear for gemm in block.attention.gemms(block.attn_norm, block.attn_norm)]


@pytest.mark.parametrize("quantization", ["fp8", "int4", "int8"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_gates_keep_16_bits_when_quantized_on_load(tmp_path: Path, name: str, quantization: str) -> None:
    Checkpoint(name, tmp_path, linear_value_head_dim=32, shared_expert_intermediate_size=32)
    schemes = [linear.scheme.name for linear in first_layers(loaded(tmp_path, quantization))]
    assert schemes == [quantization, "none", quantization]


@pytest.mark.parametrize("form", ["awq", "gptq", "gptq-activation-order", "compressed"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_gates_in_int4_are_read_dequantized(tmp_path: Path, name: str, form: str) -> None:
    """Those of a key head are fewer rows than a word of int4 codes holds."""
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 32}
    reference = Checkpoint(name, tmp_path / "plain", **sizes, **heads).reference
    form_of = {**FORMS, **SHUFFLED_FORMS}[form]
    write_int4(tmp_path, reference, form_of)
    held = load_file(tmp_path / "plain" / "model.safetensors")
    prefix, parts = "model.layers.0.linear_attn.in_proj_", ("ba",) if name == "qwen3-next" else ("b", "a")
    exact = torch.cat([packed(held[f"{prefix}{part}.weight"], form_of, zero_points=True)[1] for part in parts])
    if name == "qwen3-next":  # two rows of rates, then two of decays, for each key head
        exact = exact.unflatten(0, (4, 2, 2)).transpose(0, 1).flatten(0, 2)
    assert torch.equal(first_layers(loaded(tmp_path))[1].weight, exact)
    second = loaded(tmp_path, group=ThreadGroup(1, 2, Meeting(2)), ep_size=2 if name == "qwen3-next" else 1)
    assert torch.equal(first_layers(second)[1].weight, exact.unflatten(0, (2, 2, 4))[:, 1].flatten(0, 1))


@pytest.mark.parametrize("name", [*QWEN, "qwen3.5-with-vision-tied"])
def test_the_layer_for_multi_token_prediction_is_found_by_its_tensors(tmp_path: Path, name: str) -> None:
    reference = Checkpoint(name, tmp_path)
    assert load_hf_config(tmp_path).mtp is None
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (mtp := load_hf_config(tmp_path).mtp) is not None
    assert (mtp.prefix, mtp.block, mtp.feeds_normed) == ("mtp.", "layers.0.", True)
    reference.check()


@pytest.mark.parametrize(("quant", "suffix"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv"),
    (FORMS["compressed"].config, "weight_packed"),
    (FORMS["gptq"].config, "qweight"),
])  # fmt: skip
def test_a_layer_for_multi_token_prediction_in_16_bits_need_not_be_listed(tmp_path: Path, quant: dict[str, Any], suffix: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"quantization_config": quant}))
    layer = "layers.0.mlp.up_proj"
    names = ["model.embed_tokens.weight", f"model.{layer}.{suffix}", "mtp.fc.weight", f"mtp.{layer}.weight"]
    for more, kept in (([], True), ([f"mtp.{layer}.{suffix}"], False)):
        save_file({name: torch.ones(1) for name in names + more}, tmp_path / "model.safetensors")
        found = load_hf_config(tmp_path).quant
        assert found is not None
        assert (found.keeps(f"mtp.{layer}"), found.keeps(f"model.{layer}")) == (kept, False)


@pytest.mark.parametrize(("count", "held"), [(None, True), (0, False), (1, True), (2, False)])
def test_only_a_single_layer_for_multi_token_prediction_is_used(count: int | None, held: bool) -> None:
    assert (parse_hf_config(RAW | {"mtp_num_hidden_layers": count}, "config.json").mtp is not None) == held


@pytest.mark.parametrize(("own", "held"), [(None, True), (False, True), (True, False)])
def test_a_layer_with_an_embedding_of_its_own_is_not_used(own: bool | None, held: bool) -> None:
    assert (parse_hf_config(RAW | {"mtp_use_dedicated_embeddings": own}, "config.json").mtp is not None) == held


# ---- whole workers


def sparse_model(architecture: str, **changes: Any) -> ModelConfig:
    """A model of three layers, two of them with linear attention, with a layer for multi-token prediction."""
    delta = DeltaConfig((True, False, True), num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=8, conv_width=4)
    layers = (architecture != "Qwen3NextForCausalLM", True, True)
    moe = MoeConfig(
        num_experts=8, top_k=2, intermediate_size=48, scoring="softmax", renormalize=True, layers=layers, shared_intermediate_size=40
    )  # fmt: skip
    values: dict[str, Any] = dict(
        architecture=architecture, vocab_size=VOCAB, qk_norm=True, rotary_dim=8, delta=delta, output_gate=True, norm_offset=1.0, moe=moe,
        mtp=MTP, unused_weights=(MTP.prefix,),
    )  # fmt: skip
    return tiny_model(**{**values, **changes})


ARCHITECTURES = ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_with_drafts_equals_plain_text(tmp_path: Path, architecture: str, algorithm: str) -> None:
    model = sparse_model(architecture)
    expected = Driver(predicting.plain(model=model)).generate(PROMPTS, 20)
    driver = Driver(predicting.speculating(tmp_path, algorithm, model=model, **CHAIN))
    assert driver.generate(PROMPTS, 20, chunk=5) == expected
    assert driver.mean_accept_len() > 1.0 if algorithm == "NGRAM" else 1.1 < driver.mean_accept_len() < 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_with_the_checkpoints_own_layer_equals_plain_text(architecture: str) -> None:
    model = sparse_model(architecture)
    expected = Driver(test_mtp.plain(model)).generate(PROMPTS, 16)
    worker = test_mtp.drafting(model)
    assert isinstance(worker.parts.drafter.model.layer.mlp, SparseMlp)
    driver = Driver(worker)
    assert driver.generate(PROMPTS, 16) == expected
    assert driver.mean_accept_len() > 1.2


@pytest.mark.parametrize(("architecture", "size", "ep_size"), [
    ("Qwen3NextForCausalLM", 2, 1), ("Qwen3NextForCausalLM", 4, 2), ("Qwen3_5MoeForCausalLM", 2, 2), ("Qwen3_5MoeForCausalLM", 4, 1),
])  # fmt: skip
@pytest.mark.parametrize("draft", [None, ("NGRAM", CHAIN)], ids=["plain", "ngram"])
def test_several_ranks_generate_the_text_of_one(tmp_path: Path, architecture: str, size: int, ep_size: int, draft: Any) -> None:
    """Of four ranks two hold each KV head, but each has its own heads of linear attention."""
    model = sparse_model(architecture)
    expected, _ = texts(builder(tmp_path, draft, model)())
    with ranks(size, builder(tmp_path, draft, model, ep_size=ep_size)) as worker:
        linear, gated, _ = (layer.attention for layer in worker.parts.target.runner.model.layers)
        assert (linear.heads.num_key_heads, gated.gate_proj.out_features) == (4 // size, 64 // size)
        assert texts(worker)[0] == expected
        assert not worker.parts.target.agreement.differs.item()


def test_ranks_that_cannot_share_the_heads_are_refused(tmp_path: Path) -> None:
    model = sparse_model("Qwen3NextForCausalLM", num_q_heads=6, num_kv_heads=3)
    with pytest.raises(ConfigError, match="--tp-size 3 cannot share the 4 key heads of the linear attention of Qwen3NextForCausalLM"):
        builder(tmp_path, None, model)(group=ThreadGroup(0, 3, Meeting(3)))


# ---- files that are refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads, 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be at least 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; it must be a positive integer"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types names no full_attention; at least one layer must have it"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types must name linear_attention or full_attention for each of 3"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types must name linear_attention or full_attention"),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types must name linear_attention or full_attention"),
        ({"layer_types": "full_attention"}, "layer_types must name linear_attention or full_attention"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0; it must be a positive integer"),
        ({"layer_types": None, "full_attention_interval": 4}, "layer_types names no full_attention"),
        ({"mtp_num_hidden_layers": "one"}, "mtp_num_hidden_layers is 'one'; it must be zero or a positive integer"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope scaling 'mrope' is not supported"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    for raw in (RAW, SPARSE_RAW):
        with pytest.raises(ConfigError, match=message):
            parse_hf_config({**raw, **changes}, "config.json")
    around = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**RAW, **changes}}
    with pytest.raises(ConfigError, match=message):
        parse_hf_config(around, "config.json")


def test_layer_types_win_over_the_interval() -> None:
    raw = {**RAW, "num_hidden_layers": 6, "layer_types": None, "full_attention_interval": 3}
    every_third = parse_hf_config(raw, "config.json").delta
    assert every_third is not None
    assert every_third.layers == (True, True, False) * 2
    kinds = ["full_attention", *["linear_attention"] * 5]
    for interval in (3, None):
        named = parse_hf_config({**raw, "layer_types": kinds, "full_attention_interval": interval}, "config.json").delta
        assert named is not None
        assert named.layers == (False, *(True,) * 5)


# ---- the start of a server


def flags_for(folder: Path, raw: dict[str, Any], *more: str) -> list[str]:
    """Flags that serve a model of config.json `raw` on a CPU."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, "vocab_size": 800}))
    write_small_tokenizer(folder)
    return ["--model-path", str(folder), "--load-format", "dummy", "--device", "cpu", *more]


def test_a_server_caches_prefixes_with_their_states(tmp_path: Path) -> None:
    config, _ = prepare(parse(flags_for(tmp_path, RAW, "--max-mamba-cache-size", "7")).args)
    assert (config.cache.radix_cache, config.cache.max_mamba_cache_size) == (True, 7)
    off, _ = prepare(parse(flags_for(tmp_path, RAW, "--disable-radix-cache")).args)
    assert not off.cache.radix_cache


def test_states_of_a_model_without_are_refused(tmp_path: Path) -> None:
    llama = {**COMMON, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ConfigError, match="--max-mamba-cache-size needs a model with linear attention"):
        prepare(parse(flags_for(tmp_path, llama, "--max-mamba-cache-size", "7")).args)


@pytest.mark.parametrize(
    ("raw", "more", "message"),
    [
        (RAW, ["--speculative-algorithm", "MTP", "--speculative-eagle-topk", "2"], "topk must be 1: the model has recurrent states"),
        (SPARSE_RAW, ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "Qwen3NextForCausalLM has linear attention"),
        (RAW, ["--tp-size", "4"], "cannot share the 2 key heads of the linear attention of Qwen3_5ForCausalLM. Use a divisor"),
    ],
)
def test_what_recurrent_states_cannot_do_is_refused_before_loading(
    tmp_path: Path, raw: dict[str, Any], more: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(parse(flags_for(tmp_path, raw, *more)).args)
    assert message in str(caught.value)


def test_a_draft_with_linear_attention_is_refused_before_loading(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    flags_for(draft, RAW)
    more = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft)]
    with pytest.raises(ConfigError, match=r"The draft .*draft: Qwen3_5ForCausalLM has linear attention, which drafts cannot have"):
        prepare(parse(flags_for(tmp_path / "target", RAW, *more)).args)
