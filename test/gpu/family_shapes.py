"""Models of every family with the layer shapes of published ones, but few layers and experts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.shapes import CONFIGS

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A target's config.json, what drafts for it, and the backends that serve it."""

    config: Config
    algorithm: str
    draft: Config | None = None
    steps: int = 3
    backends: tuple[str, ...] = ("fa3", "flashinfer")

    def write(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Write the configs; returns the target's folder and the options of an engine that drafts."""
        options: dict[str, Any] = {"speculative_algorithm": self.algorithm, "speculative_num_steps": self.steps}
        for name, config in (("target", self.config), ("draft", self.draft)):
            if config is not None:
                (folder / name).mkdir()
                (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if self.draft is not None:
            options |= {"speculative_draft_model_path": str(folder / "draft"), "speculative_draft_load_format": "dummy"}
        return folder / "target", options


def _read(shape: str, **changes: Any) -> Config:
    return json.loads((CONFIGS / shape / "config.json").read_text(encoding="utf-8")) | changes


def _gemma(sparse: bool) -> Config:
    config = _read("gemma-4-31b")
    text = config["text_config"] | {"num_hidden_layers": 6, "layer_types": config["text_config"]["layer_types"][:6], "vocab_size": VOCAB}
    if sparse:
        text |= {"hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
        text |= {"intermediate_size": 2112, "enable_moe_block": True, "num_experts": 32, "top_k_experts": 8, "moe_intermediate_size": 704}
    return config | {"text_config": text}


VOCAB = 32768
FEW: Config = {"num_hidden_layers": 4, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
QWEN: Config = FEW | {"num_experts": 32}
DRAFT: Config = {"vocab_size": VOCAB, "draft_vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2}
DRAFT["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
FP8: Config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GLM: Config = FEW | {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_attention_heads": 20,
    "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "intermediate_size": 10240, "first_k_dense_replace": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "rope_theta": 1000000,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    "num_hidden_layers": 3,
}  # fmt: skip
DEEPSEEK: Config = GLM | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 18432,
    "n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
    "quantization_config": FP8, "num_hidden_layers": 2,
}  # fmt: skip
DEEPSEEK_LITE: Config = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048, "q_lora_rank": None,
    "intermediate_size": 10944, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707}, "num_nextn_predict_layers": 0,
    "quantization_config": None, "num_hidden_layers": 4,
}  # fmt: skip
DEEPSEEK_V2: Config = DEEPSEEK_LITE | {
    "hidden_size": 5120, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "intermediate_size": 12288,
    "n_routed_experts": 160, "moe_intermediate_size": 1536, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0, "quantization_config": FP8, "num_hidden_layers": 2,
}  # fmt: skip
GLM_AIR: Config = FEW | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False,
    "intermediate_size": 10944, "first_k_dense_replace": 1, "n_routed_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 1000000,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
GLM_46: Config = GLM_AIR | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    "max_position_embeddings": 202752,
}  # fmt: skip
MIMO: Config = FEW | {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 11008, "rope_theta": 640000, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
    "attention_bias": True, "tie_word_embeddings": False, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
MINIMAX: Config = FEW | {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536, "num_local_experts": 32, "num_experts_per_tok": 8,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "rotary_dim": 64,
    "rope_theta": 5000000, "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "quantization_config": FP8,
}  # fmt: skip
PHI_4: Config = FEW | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10,
    "intermediate_size": 17920, "rope_theta": 250000, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SMOLLM3: Config = FEW | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 11008, "no_rope_layers": [1, 1, 1, 0], "rope_theta": 5000000, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SEED_OSS: Config = FEW | {
    "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_size": 5120, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27648, "attention_bias": True, "attention_out_bias": False,
    "rope_theta": 10000000, "rms_norm_eps": 1e-6, "max_position_embeddings": 524288, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip
MINISTRAL: Config = FEW | {
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                        "mscale_all_dim": 1.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1},
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
GLM_4: Config = FEW | {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "intermediate_size": 13696, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
OLMO_3: Config = FEW | {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008, "sliding_window": 128, "rope_theta": 500000, "rms_norm_eps": 1e-6, "max_position_embeddings": 65536,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0,
                     "attention_factor": 1.2079441541679836},
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
EXAONE_4: Config = FEW | {
    "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_size": 5120, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27392, "sliding_window": 128, "sliding_window_pattern": 4,
    "rope_theta": 1000000, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE: Config = FEW | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12800, "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22, "logits_scaling": 16.0, "rope_theta": 10000000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
HUNYUAN: Config = FEW | {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
    "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
ARCEE: Config = FEW | {
    "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_size": 2560, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 18432, "rms_norm_eps": 1e-5, "max_position_embeddings": 65536,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "relu2", "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
                     "mscale": 1.0},
}  # fmt: skip
GEMMA_2: Config = FEW | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "query_pre_attn_scalar": 256, "sliding_window": 128,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3: Config = FEW | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 15360, "query_pre_attn_scalar": 256, "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"], "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16",
}  # fmt: skip
ERNIE: Config = FEW | {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1, "use_bias": False, "rope_theta": 500000,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
DOTS: Config = FEW | {
    "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 10944, "first_k_dense_replace": 1, "n_routed_experts": 32, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": 64, "max_window_layers": 2,
    "rope_theta": 10000000, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip
OLMOE: Config = FEW | {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "rope_theta": 10000,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SOLAR: Config = FEW | {
    "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "hidden_size": 4096, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10240, "n_routed_experts": 32, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "rope_theta": 1000000, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
HUNYUAN_MOE: Config = FEW | {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "num_experts": 32, "moe_topk": [8] * 4, "use_qk_norm": True,
    "rope_theta": 10000, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
EXAONE: Config = FEW | {
    "architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "hidden_size": 6144, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 18432, "first_k_dense_replace": 1, "num_experts": 32,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": 128, "sliding_window_pattern": 4, "rope_theta": 1000000,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_3_5: Config = FEW | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_3_5_MOE: Config = QWEN_3_5 | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_key_value_heads": 2,
    "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_QWEN_DRAFT = _read("qwen3-30b-a3b-eagle3", **DRAFT)


def _draft_of(target: Config) -> Config:
    """An EAGLE-3 head with the sizes of the target's layers."""
    sizes = {name: target[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")}
    return _QWEN_DRAFT | sizes | {"target_hidden_size": target["hidden_size"]}


_BLOCK = _read("gemma-4-31b-dflash", vocab_size=VOCAB, num_hidden_layers=2)
_BLOCK["dflash_config"] = _BLOCK["dflash_config"] | {"target_layer_ids": [1, 3, 4]}
LATENT_BACKENDS = ("fa3", "flashinfer")

FAMILIES: dict[str, Family] = {
    "qwen3-moe": Family(_read("qwen3-30b-a3b", **QWEN), "EAGLE3", _QWEN_DRAFT),
    "qwen3-moe-fp8": Family(_read("qwen3-30b-a3b-fp8", **QWEN), "EAGLE3", _QWEN_DRAFT, backends=("fa3",)),
    "gpt-oss": Family(
        _read("gpt-oss-20b", **FEW, layer_types=["sliding_attention", "full_attention"] * 2),
        "EAGLE3",
        _read("gpt-oss-20b-eagle3", **DRAFT),
        backends=("fa3",),
    ),
    "minimax-fp8": Family(MINIMAX, "EAGLE3", _draft_of(MINIMAX) | {"intermediate_size": 9216}, backends=("fa3",)),
    "phi-4": Family(PHI_4, "EAGLE3", _draft_of(PHI_4)),
    "smollm3": Family(SMOLLM3, "EAGLE3", _draft_of(SMOLLM3)),
    "seed-oss": Family(SEED_OSS, "EAGLE3", _draft_of(SEED_OSS)),
    "ministral-3": Family(MINISTRAL, "EAGLE3", _draft_of(MINISTRAL)),
    "glm-4-0414": Family(GLM_4, "EAGLE3", _draft_of(GLM_4)),
    "olmo-3": Family(OLMO_3, "EAGLE3", _draft_of(OLMO_3)),
    "exaone-4": Family(EXAONE_4, "EAGLE3", _draft_of(EXAONE_4)),
    "granite": Family(GRANITE, "EAGLE3", _draft_of(GRANITE)),
    "hunyuan": Family(HUNYUAN, "EAGLE3", _draft_of(HUNYUAN)),
    "arcee": Family(ARCEE, "EAGLE3", _draft_of(ARCEE)),
    "gemma-2": Family(GEMMA_2, "EAGLE3", _draft_of(GEMMA_2), backends=("flashinfer",)),
    "gemma-3": Family(GEMMA_3, "EAGLE3", _draft_of(GEMMA_3)),
    "ernie-moe": Family(ERNIE, "EAGLE3", _draft_of(ERNIE)),
    "dots1": Family(DOTS, "EAGLE3", _draft_of(DOTS), backends=("fa3",)),
    "olmoe": Family(OLMOE, "EAGLE3", _draft_of(OLMOE) | {"intermediate_size": 8192}),
    "solar-open": Family(SOLAR, "EAGLE3", _draft_of(SOLAR)),
    "hunyuan-moe": Family(HUNYUAN_MOE, "EAGLE3", _draft_of(HUNYUAN_MOE)),
    "exaone-moe": Family(EXAONE, "EAGLE3", _draft_of(EXAONE), backends=("fa3",)),
    "qwen3.5": Family(QWEN_3_5, "MTP", backends=("fa3",)),
    "qwen3.5-moe": Family(QWEN_3_5_MOE, "MTP", backends=("fa3",)),
    "mimo": Family(MIMO, "MTP"),
    "glm": Family(GLM, "MTP", backends=LATENT_BACKENDS),
    "glm-4.5-air": Family(GLM_AIR, "MTP"),
    "glm-4.6": Family(GLM_46, "MTP", backends=("fa3",)),
    "deepseek-v2-lite": Family(DEEPSEEK_LITE, "EAGLE3", _draft_of(DEEPSEEK_LITE), backends=LATENT_BACKENDS),
    "deepseek-v2-fp8": Family(DEEPSEEK_V2, "NGRAM", backends=("fa3",)),
    "deepseek-fp8": Family(DEEPSEEK, "MTP", backends=LATENT_BACKENDS),
    "gemma-4": Family(_gemma(sparse=False), "DFLASH", _BLOCK, steps=15, backends=("fa3",)),
    "gemma-4-sparse": Family(_gemma(sparse=True), "DFLASH", _BLOCK | {"hidden_size": 2816}, steps=15, backends=("fa3",)),
}
