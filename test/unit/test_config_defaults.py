"""Fields that a config.json leaves out or holds as null mean what they mean in transformers, for every family and every field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from runtime.errors import ConfigError
from runtime.models.config import ModelConfig
from runtime.models.registry import FAMILIES, parse_hf_config
from unit.test_models import PIECES, Checkpoint, Runner, loaded

SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
"""Every file names them; without one of them it is damaged."""
UNREAD = {
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "chunk_size_feed_forward", "id2label",
    "label2id", "is_encoder_decoder", "problem_type", "initializer_range", "use_cache", "pad_token_id", "pretraining_tp",
    "attention_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "vocab_size_per_layer_input",
}  # fmt: skip
"""Fields of transformers' classes that do not change what a model computes when it serves."""
ATTENTION: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 64,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 3, "eos_token_id": 4, "rms_norm_eps": 1e-3,
}  # fmt: skip
DERIVED_HEADS = {name: value for name, value in ATTENTION.items() if name != "head_dim"}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}
EXPERTS: dict[str, Any] = {
    "num_experts": 40, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}  # fmt: skip
GROUPED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 32, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "norm_topk_prob": False,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **DERIVED_HEADS, **GROUPED_EXPERTS, "num_key_value_heads": 64,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "rope_interleave": False,
}  # fmt: skip
DIRECT = {name: value for name, value in LATENT.items() if name != "rope_interleave"}
DELTA: dict[str, Any] = {
    **ATTENTION, "attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 16,
    "layer_types": ["full_attention", *["linear_attention"] * 6, "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip
SHARED_EXPERT: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 48}
KINDS = ["full_attention", *["sliding_attention"] * 6, "full_attention"]
QUARTER = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
HALF = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {**ATTENTION, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "MistralForCausalLM": ("mistral", {**ATTENTION, "sliding_window": 7}),
    "MinistralForCausalLM": ("ministral", {**ATTENTION, "sliding_window": 7, "layer_types": KINDS}),
    "Ministral3ForCausalLM": (
        "ministral3",
        {
            **ATTENTION, "sliding_window": 7, "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "Qwen2ForCausalLM": ("qwen2", {**ATTENTION, **WINDOWS}),
    "Qwen3ForCausalLM": ("qwen3", {**ATTENTION, **WINDOWS, "attention_bias": True}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**ATTENTION, **EXPERTS, **WINDOWS}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe", {**ATTENTION, **EXPERTS, **WINDOWS, "shared_expert_intermediate_size": 48, "qkv_bias": False},
    ),
    "Qwen3NextForCausalLM": ("qwen3_next", {**DELTA, **SHARED_EXPERT, "norm_topk_prob": False}),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", DELTA),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", {**DELTA, **SHARED_EXPERT}),
    "MixtralForCausalLM": ("mixtral", {**ATTENTION, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5}),
    "MiniMaxM2ForCausalLM": (
        "minimax_m2",
        {**ATTENTION, "num_local_experts": 9, "num_experts_per_tok": 3, "rope_parameters": HALF},
    ),
    "Gemma2ForCausalLM": (
        "gemma2",
        {
            **ATTENTION, "sliding_window": 8, "final_logit_softcapping": 20.0, "attn_logit_softcapping": 40.0, "query_pre_attn_scalar": 24,
            "attention_bias": True, "tie_word_embeddings": False, "layer_types": KINDS,
        },
    ),
    "Gemma3ForCausalLM": (
        "gemma3_text",
        {
            **ATTENTION, "sliding_window": 8, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 24, "attention_bias": True,
            "tie_word_embeddings": False, "layer_types": KINDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            },
        },
    ),
    "Gemma4ForCausalLM": (
        "gemma4_text",
        {
            **ATTENTION, "sliding_window": 8, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "enable_moe_block": True,
            "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "attention_k_eq_v": True, "num_global_key_value_heads": 16,
            "global_head_dim": 32, "tie_word_embeddings": False, "layer_types": KINDS,
        },
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        {
            **ATTENTION, "num_local_experts": 9, "num_experts_per_tok": 5, "sliding_window": 6, "attention_bias": False,
            "layer_types": KINDS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {**DIRECT, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5}),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        {
            **ATTENTION, **GROUPED_EXPERTS, "first_k_dense_replace": 3, "attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "GlmForCausalLM": ("glm", {**ATTENTION, "attention_bias": False, "tie_word_embeddings": True, "rope_parameters": QUARTER}),
    "Glm4ForCausalLM": ("glm4", {**ATTENTION, "attention_bias": False, "tie_word_embeddings": True, "rope_parameters": QUARTER}),
    "Olmo2ForCausalLM": (
        "olmo2", {**DERIVED_HEADS, "num_attention_heads": 32, "attention_bias": True, "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "Olmo3ForCausalLM": (
        "olmo3",
        {
            **DERIVED_HEADS, "num_attention_heads": 32, "attention_bias": True, "tie_word_embeddings": True, "pad_token_id": 0,
            "sliding_window": 7, "layer_types": KINDS,
        },
    ),
    "Exaone4ForCausalLM": (
        "exaone4",
        {
            **DERIVED_HEADS, "num_attention_heads": 32, "tie_word_embeddings": True, "sliding_window": 7, "sliding_window_pattern": 3,
            "layer_types": KINDS,
        },
    ),
    "GraniteForCausalLM": (
        "granite",
        {
            **ATTENTION, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 3.0,
        },
    ),
    "Ernie4_5ForCausalLM": ("ernie4_5", {**ATTENTION, "use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    "HunYuanDenseV1ForCausalLM": (
        "hunyuan_v1_dense",
        {
            **ATTENTION, "attention_bias": True, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0},
        },
    ),
    "ArceeForCausalLM": ("arcee", {**ATTENTION, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "MiMoForCausalLM": ("qwen2", {**ATTENTION, **WINDOWS}),
    "Phi3ForCausalLM": (
        "phi3",
        {
            **DERIVED_HEADS, "num_attention_heads": 32, "sliding_window": 6,
            "original_max_position_embeddings": 32, "pad_token_id": 0, "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e3, "partial_rotary_factor": 0.5,
                "short_factor": [1.5] * 4, "long_factor": [2.5] * 4,
            },
        },
    ),
    "SmolLM3ForCausalLM": (
        "smollm3",
        {
            **DERIVED_HEADS, "num_attention_heads": 32, "pad_token_id": 0,
            "use_sliding_window": True, "sliding_window": 6, "layer_types": KINDS, "no_rope_layers": [1, 1, 0, 1, 0, 1, 1, 0],
            "no_rope_layer_interval": 3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        },
    ),
    "SeedOssForCausalLM": ("seed_oss", {**ATTENTION, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "Ernie4_5_MoeForCausalLM": (
        "ernie4_5_moe",
        {
            **ATTENTION, "moe_num_experts": 40, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 2, "moe_layer_end_index": 6, "moe_layer_interval": 2, "tie_word_embeddings": False,
        },
    ),
    "Dots1ForCausalLM": (
        "dots1",
        {**ATTENTION, **GROUPED_EXPERTS, "norm_topk_prob": True, "first_k_dense_replace": 2, "attention_bias": True, "layer_types": KINDS},
    ),
    "OlmoeForCausalLM": (
        "olmoe", {**ATTENTION, "num_experts": 40, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True},
    ),
    "SolarOpenForCausalLM": (
        "solar_open",
        {
            **ATTENTION, **GROUPED_EXPERTS, "attention_bias": True, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "HunYuanMoEV1ForCausalLM": (
        "hunyuan_v1_moe",
        {
            **ATTENTION, "num_experts": 12, "moe_topk": [3] * 8, "attention_bias": True, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "alpha": 10.0, "factor": 1.0},
        },
    ),
    "ExaoneMoeForCausalLM": (
        "exaone_moe",
        {
            **ATTENTION, "num_experts": 40, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 2, "n_group": 4,
            "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "sliding_window": 6, "layer_types": KINDS,
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5,
        },
    ),
}  # fmt: skip
"""For each class, transformers' model type and a file in which as many fields as possible differ from their defaults."""
WITHOUT_MEANING = {
    "kv_lora_rank", "v_head_dim", "n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace", "n_shared_experts",
    "moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_interval",
}  # fmt: skip
"""Fields whose null transformers' classes take and its models cannot compute with."""
NO_WINDOW = {"Gemma3ForCausalLM", "Gemma2ForCausalLM", "Olmo3ForCausalLM"}
"""Classes of transformers whose models cannot compute with a `sliding_window` of null either."""


def read(raw: dict[str, Any]) -> ModelConfig | None:
    """What the file means; None where it is refused."""
    try:
        return parse_hf_config(raw, "config.json")
    except ConfigError:
        return None


def as_in_transformers(kind: str, raw: dict[str, Any], field: str) -> Any:
    """The value that transformers gives `field` of the file; raises what its class raises."""
    config = CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(raw)))
    return json.loads(json.dumps(vars(config)[config.attribute_map.get(field, field)]))


def whole(architecture: str) -> dict[str, Any]:
    """The unusual file, as transformers writes it."""
    kind, values = UNUSUAL[architecture]
    raw = json.loads(CONFIG_MAPPING[kind](**values).to_json_string(use_diff=False))
    return {**raw, "architectures": [architecture], "dtype": "float32"}


def fields_of(architecture: str) -> Iterator[str]:
    for field in dataclasses.fields(CONFIG_MAPPING[UNUSUAL[architecture][0]]):
        if field.name not in UNREAD:
            yield field.name


@pytest.mark.parametrize("architecture", UNUSUAL)
def test_an_absent_field_takes_the_default_of_transformers(architecture: str) -> None:
    kind, raw = UNUSUAL[architecture][0], whole(architecture)
    assert read(raw) is not None
    changed = 0
    for field in fields_of(architecture):
        stored = CONFIG_MAPPING[kind].attribute_map.get(field, field)
        without = {name: value for name, value in raw.items() if name not in (field, stored)}
        if field in SIZES and field not in FAMILIES[architecture].DEFAULTS:
            with pytest.raises(ConfigError, match=f"{field} is missing"):
                parse_hf_config(without, "config.json")
            continue
        value = as_in_transformers(kind, without, field)
        if field == "num_key_value_heads" and value is not None and raw["num_attention_heads"] % value:
            value = raw["num_attention_heads"]  # transformers cannot compute with its default
        expected = read({**without, field: value})
        assert read(without) == expected, field
        changed += expected != read(raw)
    assert changed >= 5, "the file differs from the defaults"


@pytest.mark.parametrize("architecture", UNUSUAL)
def test_null_means_what_transformers_takes_it_for(architecture: str) -> None:
    kind, raw = UNUSUAL[architecture][0], whole(architecture)
    for field in fields_of(architecture):
        null = {**raw, field: None}
        try:
            value = as_in_transformers(kind, null, field)
        except Exception:
            continue
        found = read(null)
        if value is not None:
            assert found == read({**raw, field: value}), field
        elif architecture == "Dots1ForCausalLM" and field in ("n_group", "topk_group"):
            assert found == read({**raw, "n_group": 4, "topk_group": 2, field: 1}), "as in some files"
        elif field in WITHOUT_MEANING or (field == "sliding_window" and architecture in NO_WINDOW):
            assert found is None, field
        elif field in ("norm_topk_prob", "rope_interleave"):
            assert found == read({**raw, field: False}), field
        elif field not in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            assert found is not None, field


def test_every_family_is_compared() -> None:
    around_a_decoder = {f"{name}ForConditionalGeneration" for name in ("Gemma3", "Gemma4", "Mistral3", "Qwen3_5", "Qwen3_5Moe")}
    assert set(UNUSUAL) | around_a_decoder | {"ExaoneMoEForCausalLM"} == set(FAMILIES)
    assert FAMILIES["ExaoneMoEForCausalLM"] is FAMILIES["ExaoneMoeForCausalLM"], "the name in published files"


@pytest.mark.parametrize(
    ("architecture", "alias", "field"),
    [
        ("Qwen3MoeForCausalLM", "num_local_experts", "num_experts"),
        ("MixtralForCausalLM", "num_experts", "num_local_experts"),
        ("MiniMaxM2ForCausalLM", "num_experts", "num_local_experts"),
        ("GptOssForCausalLM", "num_experts", "num_local_experts"),
        ("DeepseekV3ForCausalLM", "num_local_experts", "n_routed_experts"),
        ("Glm4MoeLiteForCausalLM", "num_local_experts", "n_routed_experts"),
        ("Glm4MoeForCausalLM", "num_local_experts", "n_routed_experts"),
        ("DeepseekV2ForCausalLM", "num_experts", "n_routed_experts"),
        ("Dots1ForCausalLM", "num_local_experts", "n_routed_experts"),
        ("SolarOpenForCausalLM", "num_local_experts", "n_routed_experts"),
        ("OlmoeForCausalLM", "num_local_experts", "num_experts"),
        ("HunYuanMoEV1ForCausalLM", "num_local_experts", "num_experts"),
        ("Ernie4_5_MoeForCausalLM", "num_experts", "moe_num_experts"),
    ],
)
def test_the_number_of_experts_has_the_names_of_transformers(architecture: str, alias: str, field: str) -> None:
    raw = whole(architecture)
    renamed = {name: value for name, value in raw.items() if name not in (alias, field)} | {alias: 16}
    for given in (renamed, {**renamed, field: 12}):
        value = as_in_transformers(UNUSUAL[architecture][0], given, alias)
        assert (model := read(given)) is not None
        assert model.moe is not None
        assert model.moe.num_experts == value == 16


def test_the_experts_of_qwen2_have_one_name_as_in_transformers() -> None:
    raw = whole("Qwen2MoeForCausalLM")
    assert read({**raw, "num_local_experts": 16}) == read(raw)


def test_the_rotated_part_of_minimax_is_named_as_in_transformers() -> None:
    raw = whole("MiniMaxM2ForCausalLM")
    for rope, partial in (({"rope_theta": 1e4}, {}), ({"partial_rotary_factor": 1.0}, {}), ({}, {"partial_rotary_factor": 0.25})):
        given = {**raw, **partial, "rope_parameters": {"rope_type": "default", **rope}, "rotary_dim": 8}
        factor = as_in_transformers("minimax_m2", given, "rope_parameters")["partial_rotary_factor"]
        assert (model := read(given)) is not None
        assert (model.rotary_dim or model.head_dim) == int(16 * factor)


@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("inner", [{}, {"tie_word_embeddings": False}])
def test_a_model_around_gemma_ties_its_embeddings_as_in_transformers(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    kept = [*SIZES, "num_key_value_heads", "hidden_size_per_layer_input"]
    text = {name: value for name, value in whole("Gemma4ForCausalLM").items() if name in kept}
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": {**text, **inner}, **outer}
    config = CONFIG_MAPPING["gemma4"].from_dict(json.loads(json.dumps(raw)))
    assert (model := read(raw)) is not None
    assert model.tie_embeddings == config.tie_word_embeddings
    assert [window >= 0 for window in model.window] == [kind == "sliding_attention" for kind in config.text_config.layer_types]
    assert max(model.window) == config.text_config.sliding_window - 1


def test_mistral_with_vision_has_its_own_head_if_the_file_does_not_say_so(tmp_path: Path) -> None:
    """As in published files, which leave `tie_word_embeddings` out; transformers' class has true as its default."""
    reference = Checkpoint("mistral3-with-vision", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["tie_word_embeddings"], raw["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    reference.check()


OUTER = {"hidden_size": 32, "num_hidden_layers": 1, "rms_norm_eps": 0.3, "final_logit_softcapping": 1.0, "rope_parameters": {}}
"""Fields that describe other parts of a multimodal model, or nothing."""


def test_fields_around_gemma_are_not_those_of_its_decoder(tmp_path: Path) -> None:
    reference = Checkpoint("gemma4-with-vision", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | OUTER))
    reread = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(reread(reference.ids[None]).logits[0], reference.logits, rtol=1e-4, atol=1e-4)
    reference.check()


def test_layers_of_gemma_may_all_have_the_same_heads(tmp_path: Path) -> None:
    reference = Checkpoint("gemma4-own-values", tmp_path, per_layer_config={})
    assert json.loads((tmp_path / "config.json").read_text())["per_layer_config"] == {}
    logits = Runner(loaded(tmp_path), 16).in_pieces(reference.ids, PIECES["prefill"])
    torch.testing.assert_close(logits, reference.logits, rtol=1e-4, atol=1e-4 * float(reference.logits.abs().max()))


DEFAULT_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3.5": {"num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "rope_parameters": None},
    "qwen3.5-moe": {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    "qwen3-next": {"num_experts_per_tok": 10, "num_experts": 512, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen2-moe": {},
    "qwen3-moe": {},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 8},
    "minimax-m2": {"num_experts_per_tok": 8, "rope_parameters": {"partial_rotary_factor": 0.5}},
    "gpt-oss": {"num_experts_per_tok": 4, "sliding_window": 128},
    "gemma2": {"attn_logit_softcapping": 50.0},
    "gemma3": {},
    "gemma4-own-values": {},
    "ernie-moe": {"moe_num_experts": 64, "moe_k": 6, "num_key_value_heads": 4, "moe_layer_end_index": 2, "tie_word_embeddings": True},
    "dots1": {"n_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "exaone-moe": {"num_experts": 64, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "n_group": 1, "sliding_window_pattern": 4},
    "deepseek-v2-lite": {"routed_scaling_factor": 1.0, "n_routed_experts": 64, "first_k_dense_replace": 0},
    "deepseek-experts": {"n_routed_experts": 16, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    "olmo2": {"num_key_value_heads": 4},
    "olmo3": {"num_key_value_heads": 4},
    "granite": {"embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    "ernie4.5": {},
    "arcee": {"num_key_value_heads": 4},
    "hunyuan": {"num_key_value_heads": 4},
    "glm": {},
    "glm4": {},
    "glm4-flash": {"routed_scaling_factor": 1.8, "num_experts_per_tok": 4},
    "glm4-moe-without-norms": {
        "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 2, "rope_parameters": None,
    },
}  # fmt: skip
"""Changes that give the tiny models of these names more of the defaults of their classes."""


@pytest.mark.parametrize("name", DEFAULT_CHECKPOINTS)
def test_a_file_without_what_is_default_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    reference = Checkpoint(name, tmp_path, **DEFAULT_CHECKPOINTS[name])
    raw = json.loads((tmp_path / "config.json").read_text())
    default = json.loads(type(reference.reference.config)().to_json_string(use_diff=False))
    kept = {field: value for field, value in raw.items() if field in SIZES or field == "architectures" or value != default.get(field)}
    assert len(kept) < len(raw) - 10
    (tmp_path / "config.json").write_text(json.dumps(kept))
    reference.check()
