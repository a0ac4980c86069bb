"""The published config.json files of models with latent attention or a layer for multi-token prediction."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import ConfigError
from runtime.models.config import LatentConfig, ModelConfig
from runtime.models.registry import load_hf_config, parse_hf_config

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_theta": 10000, "max_position_embeddings": 163840, "vocab_size": 129280, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_method": "greedy", "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000,
    "max_position_embeddings": 163840, "vocab_size": 102400, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "bos_token_id": 100000,
    "eos_token_id": 100001,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
DEEPSEEK_V2: dict[str, Any] = DEEPSEEK_LITE | {
    "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
    "topk_method": "group_limited_greedy", "q_lora_rank": 1536,
}  # fmt: skip
KIMI_K2: dict[str, Any] = DEEPSEEK | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "max_position_embeddings": 131072, "vocab_size": 163840, "bos_token_id": 163584, "eos_token_id": 163585,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
KIMI_K2_THINKING: dict[str, Any] = KIMI_K2 | {
    "max_position_embeddings": 262144, "rope_scaling": KIMI_K2["rope_scaling"] | {"factor": 64.0},
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None, "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
                        "actorder": None, "observer": "minmax"},
        }},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}  # fmt: skip
MOONLIGHT: dict[str, Any] = KIMI_K2 | {
    "model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.446, "q_lora_rank": None, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "quantization_config": None,
}  # fmt: skip
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_theta": 1000000, "max_position_embeddings": 202752, "vocab_size": 154880,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
GLM_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 131072, "vocab_size": 151552,
    "rms_norm_eps": 1e-5, "eos_token_id": [151329, 151336, 151338], "torch_dtype": "bfloat16",
}  # fmt: skip
GLM_46: dict[str, Any] = GLM_AIR | {
    "hidden_size": 5120, "num_hidden_layers": 92, "use_qk_norm": True, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "max_position_embeddings": 202752,
}  # fmt: skip
MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 11008, "rope_theta": 640000, "max_position_embeddings": 32768,
    "vocab_size": 151680, "rms_norm_eps": 1e-5, "use_sliding_window": False, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


def parsed(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_hf_config(raw | changes, "config.json")


def test_deepseek_v3() -> None:
    config = parsed(DEEPSEEK)
    correction = 0.1 * math.log(40) + 1
    assert config.latent == LatentConfig(1536, 512, 128, 128, pytest.approx(192**-0.5 * correction**2))
    assert (config.head_dim, config.rope_interleaved, config.max_context_len, config.kv_columns) == (64, True, 163840, 576)
    assert config.rope_scaling is not None
    assert config.rope_scaling.magnitude == 1.0
    moe = config.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.top_groups, moe.scaling) == (256, 8, 8, 4, 2.5)
    assert (moe.layers.index(True), len(moe.layers), moe.shared_intermediate_size, moe.renormalize) == (3, 61, 2048, True)
    assert config.mtp is not None
    assert config.mtp.prefix == "model.layers.61."
    assert config.quant is not None
    assert config.quant.keeps("model.layers.61.eh_proj"), "the checkpoint holds it in bfloat16"
    assert not config.quant.keeps("model.layers.61.self_attn.q_b_proj")


def test_kimi_k2_and_moonlight() -> None:
    for raw, factor, context in ((KIMI_K2, 32, 131072), (KIMI_K2_THINKING, 64, 262144), (MOONLIGHT, 1, 8192)):
        config, moe = parsed(raw), parsed(raw).moe
        scale = 192**-0.5 * (0.1 * math.log(factor) + 1) ** 2
        assert config.latent == LatentConfig(raw["q_lora_rank"], 512, 128, 128, pytest.approx(scale))
        assert (config.rope_theta, config.max_context_len, config.mtp, config.num_q_heads) == (
            50000,
            context,
            None,
            raw["num_attention_heads"],
        )
        assert moe is not None
        assert (moe.num_experts, moe.num_groups, moe.scaling) == (raw["n_routed_experts"], 1, raw["routed_scaling_factor"])
        assert (moe.scoring, moe.correction, moe.renormalize, moe.layers.index(True)) == ("sigmoid", True, True, 1)
    quant, layer = parsed(KIMI_K2_THINKING).quant, "model.layers.5."
    assert quant is not None
    assert quant.int4 is not None
    kept = ("self_attn.kv_b_proj", "mlp.shared_experts.up_proj", "mlp.down_proj")
    assert all(quant.keeps(layer + name) for name in kept)
    assert not quant.keeps(layer + "mlp.experts.7.gate_proj")


def test_deepseek_v2_and_its_lite_model() -> None:
    correction = 0.1 * 0.707 * math.log(40) + 1
    for raw, rank, groups in ((DEEPSEEK_LITE, None, (1, 1)), (DEEPSEEK_V2, 1536, (8, 3))):
        config, moe = parsed(raw), parsed(raw).moe
        assert config.latent == LatentConfig(rank, 512, 128, 128, pytest.approx(192**-0.5 * correction**2))
        assert (config.rope_interleaved, config.max_context_len, config.mtp, config.kv_columns) == (True, 163840, None, 576)
        assert moe is not None
        assert (moe.num_experts, moe.num_groups, moe.top_groups, moe.group_best) == (raw["n_routed_experts"], *groups, 1)
        assert (moe.scoring, moe.renormalize, moe.correction, moe.scaling) == ("softmax", False, False, raw["routed_scaling_factor"])
        assert (moe.layers.index(True), moe.shared_intermediate_size, moe.top_k) == (1, 2 * raw["moe_intermediate_size"], 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'softmax' is supported"),
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; only 'greedy' and 'group_limited_greedy' are supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True; only False is supported"),
        ({"mlp_bias": True}, "mlp_bias is True; only False is supported"),
        ({"topk_group": 9}, "topk_group is 9; it must be at most n_group, 8"),
    ],
)
def test_variants_of_deepseek_v2_that_are_not_supported_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(DEEPSEEK_V2, **changes)


def test_glm_flash() -> None:
    config = parsed(GLM)
    assert config.latent == LatentConfig(768, 512, 192, 256, pytest.approx(1 / 16))
    assert config.mtp is not None
    assert config.moe is not None
    assert (config.mtp.prefix, config.moe.layers.index(True), config.moe.scaling) == ("model.layers.47.", 1, 1.8)
    named = parsed(GLM, mlp_layer_types=["dense"] * 2 + ["sparse"] * 45)
    assert named.moe is not None
    assert named.moe.layers.index(True) == 2


@pytest.mark.parametrize(("raw", "norms", "dense"), [(GLM_AIR, False, 1), (GLM_46, True, 3)], ids=["4.5-air", "4.6"])
def test_glm_with_attention_per_head(raw: dict[str, Any], norms: bool, dense: int) -> None:
    config, moe = parsed(raw), parsed(raw).moe
    assert (config.latent, config.head_dim, config.rotary_dim, config.rope_interleaved, config.qk_norm) == (None, 128, 64, False, norms)
    assert (config.qkv_bias, config.o_bias, config.eos_ids) == (True, False, (151329, 151336, 151338))
    assert moe is not None
    assert (moe.num_experts, moe.scaling, moe.layers.index(True)) == (raw["n_routed_experts"], raw["routed_scaling_factor"], dense)
    assert (moe.scoring, moe.renormalize, moe.shared_intermediate_size) == ("sigmoid", True, raw["moe_intermediate_size"])
    assert config.mtp is not None
    assert config.mtp.prefix == f"model.layers.{raw['num_hidden_layers']}."


def test_mimo() -> None:
    config = parsed(MIMO)
    assert (config.qkv_bias, config.latent, config.moe, set(config.window)) == (True, None, None, {-1})
    assert config.mtp is not None
    assert config.mtp.hidden_first
    assert config.mtp.blank_start


@pytest.mark.parametrize("raw", [DEEPSEEK, GLM, GLM_AIR, MIMO], ids=["deepseek", "glm", "glm-air", "mimo"])
def test_the_layer_is_ignored_where_the_file_does_not_count_it(raw: dict[str, Any]) -> None:
    config = parsed(raw, num_nextn_predict_layers=0)
    assert config.mtp is None
    assert config.unused_weights, "a checkpoint may hold it all the same"


@pytest.mark.parametrize("raw", [DEEPSEEK, GLM, GLM_AIR, MIMO], ids=["deepseek", "glm", "glm-air", "mimo"])
def test_the_layer_is_ignored_where_the_weights_lack_it(tmp_path: Path, raw: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    counted = load_hf_config(tmp_path)
    assert counted.mtp is not None, "there are no weights yet"
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert load_hf_config(tmp_path).mtp is None
    save_file({f"{counted.mtp.prefix}{counted.mtp.proj}.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert load_hf_config(tmp_path).mtp == counted.mtp


@pytest.mark.parametrize("raw", [DEEPSEEK, GLM, GLM_46], ids=["deepseek", "glm", "glm-4.6"])
def test_further_layers_for_multi_token_prediction_are_left_out(raw: dict[str, Any]) -> None:
    config, first = parsed(raw, num_nextn_predict_layers=3), raw["num_hidden_layers"]
    assert config.mtp is not None
    assert config.mtp.prefix == f"model.layers.{first}."
    assert config.unused_weights == tuple(f"model.layers.{first + i}." for i in range(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc' is supported"),
        ({"n_group": 7}, "n_routed_experts is 256; it must be a multiple of n_group, 7"),
        ({"n_group": 256}, "n_group is 256; a group needs two of the experts, and n_routed_experts is 256"),
        ({"n_group": None}, "n_group is missing; it must be a positive integer"),
        ({"topk_group": 9}, "topk_group is 9; it must be at most n_group, 8"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257; it must be at most n_routed_experts, 256"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129; it must be at most 128, the experts of topk_group, 4, groups"),
        ({"num_local_experts": 4}, "num_experts_per_tok is 8; it must be at most num_local_experts, 4"),
        ({"head_dim": 192}, "head_dim is 192; it must be that of qk_rope_head_dim, 64, or absent"),
        ({"qk_rope_head_dim": 63}, "63 of the 63 entries of a head are rotated; the number must be even"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it must be true or false"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias is true without q_lora_rank"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(DEEPSEEK, **changes)
    with pytest.raises(ConfigError, match="mlp_layer_types must name dense or sparse for each of 47 layers"):
        parsed(GLM, mlp_layer_types=["dense"])
    with pytest.raises(ConfigError, match="scoring_func is 'softmax'; only 'sigmoid' is supported"):
        parsed(GLM_AIR, scoring_func="softmax")
