from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.entrypoints.grammars import eos_ids_of
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionShape, plan_pass
from runtime.layers.attention.registry import build_backend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.latent_attention import LatentAttention
from runtime.layers.linear import Linear
from runtime.layers.quantization.int8 import Int8
from runtime.layers.sparse_mlp import SparseMlp
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.state_pool import StatePool
from runtime.model_executor.weight_loader import dummy_weights, safetensors_weights
from runtime.models.block import Block
from runtime.models.checkpoint_parts import holds_nan
from runtime.models.config import ModelConfig, RopeScaling
from runtime.models.decoder import DecoderModel
from runtime.models.registry import FAMILIES as FAMILIES_BY_NAME
from runtime.models.registry import build_model, load_hf_config, parse_hf_config
from unit import toy_family
from unit.latent import DEEPSEEK_EXPERTS, LATENT, YARN
from unit.small_tokenizer import reference, write_small_tokenizer
from unit.tiny import tiny_model

CPU = torch.device("cpu")
VOCAB, LENGTH, MAX_LEN = 101, 40, 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SPARSE = {**COMMON, "num_experts_per_tok": 3, "initializer_range": 0.12}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32}
GEMMA4: dict[str, Any] = {
    **COMMON,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
}
GEMMA3: dict[str, Any] = {
    **COMMON,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    },
}
GEMMA2: dict[str, Any] = {**COMMON, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6, "attn_logit_softcapping": 3.0}
YARN_ON_FULL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0},
}
GRANITE = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 3.0, "rms_norm_eps": 0.01,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
GPT_OSS = {**COMMON, "num_local_experts": 8, "num_experts_per_tok": 8, "head_dim": 16, "sliding_window": 6}
GPT_OSS |= {"intermediate_size": 32, "initializer_range": 0.2}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "position_embedding_size": 16,
}  # fmt: skip
PIXTRAL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
MINISTRAL3 = {
    **COMMON,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
    },
}  # fmt: skip
DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**COMMON | DELTA | {"initializer_range": 0.1})),
    "qwen3.5-with-vision-tied": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(
            text_config={
                **COMMON,
                **DELTA,
                "initializer_range": 0.12,
                "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [],
            },
            tie_word_embeddings=True,
        ),
    ),
    "qwen3.5-moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**SPARSE | DELTA | EXPERTS | SHARED_EXPERT)),
    "qwen3-next": (Qwen3NextForCausalLM, Qwen3NextConfig(**SPARSE | DELTA | EXPERTS | SHARED_EXPERT, mlp_only_layers=[1])),
    "qwen3-next-even": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **{**SPARSE, **DELTA, **EXPERTS, **SHARED_EXPERT, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
            decoder_sparse_step=2,
            norm_topk_prob=False,
        ),
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**COMMON)),
    "llama-tied-biases-llama3": (
        LlamaForCausalLM,
        LlamaConfig(**COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    ),
    "llama-linear-rope-wide-heads": (
        LlamaForCausalLM,
        LlamaConfig(**COMMON, head_dim=32, rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON, tie_word_embeddings=True)),
    "mimo": (Qwen2ForCausalLM, Qwen2Config(**COMMON)),
    "qwen2-window-on-late-layers": (
        Qwen2ForCausalLM,
        Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=16)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GEMMA2)),
    "gemma2-without-caps": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **{**GEMMA2, "attn_logit_softcapping": None},
            final_logit_softcapping=None,
            tie_word_embeddings=False,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**GEMMA3)),
    "gemma3-untied-biases-softcap": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **{**GEMMA3, "rope_parameters": None, "layer_types": None},
            sliding_window_pattern=2,
            tie_word_embeddings=False,
            attention_bias=True,
            final_logit_softcapping=20.0,
        ),
    ),
    "gemma3-with-vision": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(text_config=GEMMA3, vision_config={"model_type": "siglip_vision_model", **SIGLIP}, mm_tokens_per_image=4),
    ),
    "gemma4-shared-kv": (Gemma4ForCausalLM, Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1)),
    "gemma4-own-values": (Gemma4ForCausalLM, Gemma4TextConfig(**{**GEMMA4, "final_logit_softcapping": None}, attention_k_eq_v=False)),
    "gemma4-dense-and-sparse": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24),
    ),
    "gemma4-with-vision": (
        Gemma4ForConditionalGeneration,
        Gemma4Config(text_config={**GEMMA4, "attention_k_eq_v": True}, vision_config=VISION, audio_config=None),
    ),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(**GPT_OSS, rope_parameters=None)),
    "gpt-oss-without-biases": (
        GptOssForCausalLM,
        GptOssConfig(**GPT_OSS, attention_bias=False, layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "mistral3-with-vision": (
        Mistral3ForConditionalGeneration,
        Mistral3Config(
            text_config={"model_type": "mistral", **COMMON}, vision_config={"model_type": "pixtral", **PIXTRAL}, tie_word_embeddings=False
        ),
    ),
    "mistral3-tied": (
        Mistral3ForConditionalGeneration,
        Mistral3Config(text_config={"model_type": "mistral", **COMMON}, vision_config={"model_type": "pixtral", **PIXTRAL}),
    ),
    "ministral3": (Ministral3ForCausalLM, Ministral3Config(**MINISTRAL3)),
    "ministral3-window-tied": (Ministral3ForCausalLM, Ministral3Config(**MINISTRAL3, sliding_window=7, tie_word_embeddings=True)),
    "ministral3-with-vision": (
        Mistral3ForConditionalGeneration,
        Mistral3Config(text_config={"model_type": "ministral3", **MINISTRAL3}, vision_config={"model_type": "pixtral", **PIXTRAL}),
    ),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig(**COMMON, head_dim=16, sliding_window=6, layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "mistral-window": (MistralForCausalLM, MistralConfig(**COMMON, sliding_window=7)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SPARSE, **EXPERTS, head_dim=16, norm_topk_prob=True)),
    "qwen3-moe-some-layers-dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SPARSE, **EXPERTS, head_dim=16, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[0]),
    ),
    "qwen3-moe-windows": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SPARSE, **EXPERTS, head_dim=16, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SPARSE, num_local_experts=6)),
    "mixtral-window": (MixtralForCausalLM, MixtralConfig(**SPARSE, num_local_experts=6, sliding_window=5)),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig(**SPARSE, **EXPERTS, shared_expert_intermediate_size=48)),
    "qwen2-moe-windows": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SPARSE,
            **EXPERTS,
            shared_expert_intermediate_size=48,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    ),
    "minimax-m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config(
            **{**SPARSE, "initializer_range": 0.05},
            num_local_experts=8,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
    ),
    "mistral-no-window": (MistralForCausalLM, MistralConfig(**COMMON, sliding_window=None)),
    "deepseek-dense": (DeepseekV3ForCausalLM, DeepseekV3Config(**COMMON | LATENT, first_k_dense_replace=3)),
    "deepseek-yarn": (DeepseekV3ForCausalLM, DeepseekV3Config(**COMMON | LATENT, first_k_dense_replace=3, rope_parameters=YARN)),
    "deepseek-direct-queries-halves": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**COMMON | LATENT | {"q_lora_rank": None}, first_k_dense_replace=3, rope_interleave=False),
    ),
    "deepseek-experts": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**COMMON | LATENT | DEEPSEEK_EXPERTS, first_k_dense_replace=1, n_group=2, topk_group=1),
    ),
    "glm": (GlmForCausalLM, GlmConfig(**COMMON, head_dim=16, pad_token_id=0)),
    "glm4": (Glm4ForCausalLM, Glm4Config(**COMMON, head_dim=16, pad_token_id=0)),
    "glm4-tied-whole-heads": (
        Glm4ForCausalLM,
        Glm4Config(
            **COMMON,
            head_dim=16,
            pad_token_id=0,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        ),
    ),
    "deepseek-v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **COMMON | LATENT | DEEPSEEK_EXPERTS,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            rope_parameters=YARN,
        ),
    ),
    "deepseek-v2-lite": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(**COMMON | LATENT | DEEPSEEK_EXPERTS | {"q_lora_rank": None, "n_shared_experts": 2}, first_k_dense_replace=1),
    ),
    "kimi-k2": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **COMMON | LATENT | DEEPSEEK_EXPERTS | {"n_routed_experts": 12, "routed_scaling_factor": 2.827},
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            rope_parameters=YARN | {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
    "moonlight": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **COMMON | LATENT | DEEPSEEK_EXPERTS | {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 2.446},
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            rms_norm_eps=1e-5,
        ),
    ),
    "glm4-flash": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig(**COMMON | LATENT | DEEPSEEK_EXPERTS)),
    "glm4-moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(**COMMON | DEEPSEEK_EXPERTS, head_dim=16, attention_bias=True, use_qk_norm=True, n_group=2, topk_group=1),
    ),
    "glm4-moe-without-norms": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **COMMON | DEEPSEEK_EXPERTS | {"n_shared_experts": 2},
            first_k_dense_replace=2,
            norm_topk_prob=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        ),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**COMMON)),
    "olmo2-tied-biases": (Olmo2ForCausalLM, Olmo2Config(**COMMON, tie_word_embeddings=True, attention_bias=True)),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config(**COMMON, sliding_window=6, layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
    ),
    "olmo3-yarn": (
        Olmo3ForCausalLM,
        Olmo3Config(
            **COMMON,
            sliding_window=6,
            rope_parameters=YARN_ON_FULL,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config(**COMMON, head_dim=16, sliding_window=6, sliding_window_pattern=2)),
    "exaone4-no-windows": (
        Exaone4ForCausalLM,
        Exaone4Config(**COMMON, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True),
    ),
    "granite": (GraniteForCausalLM, GraniteConfig(**COMMON, **GRANITE)),
    "granite-tied-biases": (
        GraniteForCausalLM,
        GraniteConfig(
            **COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, residual_multiplier=2.5, attention_multiplier=0.2
        ),
    ),
    "ernie4.5": (Ernie4_5ForCausalLM, Ernie4_5Config(**COMMON, head_dim=16)),
    "ernie4.5-biases": (Ernie4_5ForCausalLM, Ernie4_5Config(**COMMON, head_dim=32, use_bias=True, tie_word_embeddings=False)),
    "hunyuan": (HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config(**COMMON, head_dim=16)),
    "hunyuan-alpha": (
        HunYuanDenseV1ForCausalLM,
        HunYuanDenseV1Config(
            **COMMON,
            head_dim=32,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0},
        ),
    ),
    "arcee": (ArceeForCausalLM, ArceeConfig(**{**COMMON, "initializer_range": 0.15})),
    "arcee-tied-biases": (
        ArceeForCausalLM,
        ArceeConfig(**{**COMMON, "initializer_range": 0.15}, head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**COMMON, pad_token_id=0)),
    "phi3-window-longrope": (
        Phi3ForCausalLM,
        Phi3Config(
            **COMMON,
            pad_token_id=0,
            sliding_window=7,
            original_max_position_embeddings=4,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "attention_factor": 1.1,
                "short_factor": [1.0 + i / 8 for i in range(6)],
                "long_factor": [2.0 + i for i in range(6)],
            },
        ),
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**COMMON, pad_token_id=0, no_rope_layers=[1, 0, 1])),
    "smollm3-windows-biases": (
        SmolLM3ForCausalLM,
        SmolLM3Config(
            **COMMON,
            pad_token_id=0,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=6,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "seed-oss": (SeedOssForCausalLM, SeedOssConfig(**COMMON, head_dim=16, attention_out_bias=True, mlp_bias=True)),
    "ernie-moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig(**COMMON, moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_layer_end_index=1),
    ),
    "ernie-moe-every-second-layer": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig(
            **COMMON,
            moe_num_experts=8,
            moe_k=2,
            moe_intermediate_size=32,
            moe_num_shared_experts=1,
            moe_layer_start_index=0,
            moe_layer_interval=2,
            tie_word_embeddings=False,
        ),
    ),
    "dots1": (Dots1ForCausalLM, Dots1Config(**COMMON | DEEPSEEK_EXPERTS, first_k_dense_replace=1, n_group=2, norm_topk_prob=True)),
    "dots1-windows": (
        Dots1ForCausalLM,
        Dots1Config(**COMMON | DEEPSEEK_EXPERTS | {"n_shared_experts": 2}, sliding_window=6, max_window_layers=1, attention_bias=True),
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SPARSE | {"num_key_value_heads": 4}, num_experts=8)),
    "olmoe-renormalised": (OlmoeForCausalLM, OlmoeConfig(**SPARSE, num_experts=8, norm_topk_prob=True, attention_bias=True)),
    "solar-open": (
        SolarOpenForCausalLM,
        SolarOpenConfig(**COMMON | DEEPSEEK_EXPERTS, head_dim=16, attention_bias=True, n_group=2, topk_group=1),
    ),
    "exaone-moe": (
        ExaoneMoeForCausalLM,
        ExaoneMoeConfig(
            **COMMON | EXPERTS | {"initializer_range": 0.2},
            num_experts_per_tok=2,
            n_group=2,
            sliding_window=6,
            sliding_window_pattern=3,
        ),
    ),
    "hunyuan-moe": (
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config(
            **SPARSE | {"intermediate_size": 32, "num_experts_per_tok": [3, 3, 3]},
            num_experts=8,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        ),
    ),
    "hunyuan-moe-biases": (
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config(**SPARSE | {"intermediate_size": 32}, num_experts=8, head_dim=16, attention_bias=True),
    ),
    "deepseek-biases": (DeepseekV3ForCausalLM, DeepseekV3Config(**COMMON | LATENT, first_k_dense_replace=3, attention_bias=True)),
}

OTHER_CLASSES = {"mimo": "MiMoForCausalLM"}
"""Classes that transformers lacks, whose layers are those of the family's class."""


class Checkpoint:
    """A tiny random model of one family, saved to a folder, and its reference logits."""

    def __init__(self, family: str, folder: Path, **changes: object) -> None:
        torch.manual_seed(sum(map(ord, family)))
        cls, config = FAMILIES[family]
        self.reference: Any = cls(type(config)(**{**config.to_dict(), **changes})).eval()
        with torch.no_grad():
            for parameter in self.reference.parameters():
                if parameter.dim() == 1:  # biases begin as zeros and norms as ones, which would hide a swapped one
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, tensor in (*self.reference.named_buffers(), *self.reference.named_parameters()):
                if name.endswith("e_score_correction_bias"):  # zeros too
                    tensor.add_(torch.randn_like(tensor) * 0.2)
            self.ids = torch.randint(0, VOCAB, (LENGTH,))
            out = self.reference(self.ids[None], output_hidden_states=True)
        self.logits, self.hidden = out.logits[0], out.hidden_states
        self.folder = folder
        self.reference.save_pretrained(folder)
        if family in OTHER_CLASSES:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [OTHER_CLASSES[family]]}))

    def check(self, pieces: Sequence[tuple[int, ForwardMode]] = ((LENGTH, ForwardMode.EXTEND),)) -> None:
        """Compare the logits of the saved model, computed in `pieces`, with those of transformers."""
        assert_same_logits(Runner(loaded(self.folder), 16).in_pieces(self.ids, pieces), self.logits)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(checkpoint: Checkpoint) -> DecoderModel:
    """The model of the checkpoint, which tests leave as it is."""
    return loaded(checkpoint.folder)


class Runner:
    """A model over a pool of scattered pages that belongs to one request, row 2."""

    def __init__(self, model: DecoderModel, page_size: int) -> None:
        pages = MAX_LEN // page_size
        layers = model.attention_specs
        pool = KVPool([layer.kv for layer in layers], 3 * pages, page_size, CPU)
        for cache in (*pool.k, *pool.v):
            cache.fill_(77.0)  # what a slot held before must not matter
        self.table = PageTable(3, MAX_LEN, page_size, CPU)
        ids = np.random.default_rng(page_size).permutation(3 * pages)[:pages] + 1
        self.table.pages[2] = torch.from_numpy(ids.astype(np.int32))
        shape = AttentionShape(layers, 4, 4, MAX_LEN, tuning=H200)
        self.backend = build_backend("torch_native", shape, pool, self.table)
        states = StatePool(model.state_specs, 3, 4, CPU) if model.state_specs else None
        self.model, self.caches = model, (*pool.k, *pool.v)
        model.bind(pool, self.backend, states)

    def hidden(
        self, ids: torch.Tensor, start: int, mode: ForwardMode, aux: tuple[int, ...] = (), wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of the tokens `ids`, which begin at position `start`, or of the `wanted` ones among them."""
        n, extend = len(ids), mode == ForwardMode.EXTEND
        positions, rows = torch.arange(start, start + n), torch.full((n,), 2)
        batch = ForwardBatch(
            mode=mode,
            batch_size=1,
            tokens_per_req=0 if extend else n,
            input_ids=ids,
            positions=positions,
            out_cache_loc=self.table.slots(rows, positions),
            req_pool_indices=rows[:1],
            seq_lens=torch.tensor([start + n], dtype=torch.int32),
            qo_indptr=torch.tensor([0, n], dtype=torch.int32),
            seq_len_bounds=np.array([start + n], dtype=np.int32),
            extend_lens=np.array([n], dtype=np.int32) if extend else None,
        )
        with torch.inference_mode():
            plan_pass(self.backend, batch)
            return self.model.forward(batch, aux, wanted)

    def logits(self, ids: torch.Tensor, start: int, mode: ForwardMode) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.logits(self.hidden(ids, start, mode)[0])

    def in_pieces(self, ids: torch.Tensor, pieces: Sequence[tuple[int, ForwardMode]]) -> torch.Tensor:
        """Logits of `ids` cut into passes of the given lengths and modes."""
        out, start = [], 0
        for length, mode in pieces:
            out.append(self.logits(ids[start : start + length], start, mode))
            start += length
        assert start == len(ids)
        return torch.cat(out)


def loaded(folder: Path, quantization: str | None = None, **options: Any) -> DecoderModel:
    model = build_model(load_hf_config(folder), TorchOps(), torch.float32, CPU, quantization, **options)
    model.load(safetensors_weights(folder, progress=False))
    return model


def assert_same_logits(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.abs().max())))


EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
PIECES = {
    "prefill": [(LENGTH, EXTEND)],
    "chunked prefill": [(13, EXTEND), (1, EXTEND), (26, EXTEND)],
    "decode": [(20, EXTEND), *[(1, DECODE)] * 20],
    "verify": [(20, EXTEND), *[(4, VERIFY)] * 5],
}


@pytest.mark.parametrize("dense", [0, 2, 3])
def test_any_number_of_dense_layers_matches_transformers(tmp_path: Path, dense: int) -> None:
    """transformers names each layer's kind; published files count the dense ones."""
    reference = Checkpoint("glm4-flash", tmp_path, mlp_layer_types=["dense"] * dense + ["sparse"] * (3 - dense))
    for counted in (False, True):
        if counted:
            raw = json.loads((tmp_path / "config.json").read_text())
            del raw["mlp_layer_types"]
            (tmp_path / "config.json").write_text(json.dumps(raw | {"first_k_dense_replace": dense}))
        reference.check(PIECES["chunked prefill"])


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kinds", [None, ["sliding_attention", "full_attention", "sliding_attention"]])
def test_windows_of_smollm3_match_transformers(tmp_path: Path, kinds: list[str] | None, used: bool) -> None:
    reference = Checkpoint("smollm3", tmp_path, use_sliding_window=used, sliding_window=6, layer_types=kinds)
    reference.check(PIECES["chunked prefill"])


@pytest.mark.parametrize("name", ["gemma4-own-values", "gpt-oss"])
def test_an_activation_that_a_family_does_not_read_may_be_any(tmp_path: Path, name: str) -> None:
    reference = Checkpoint(name, tmp_path, hidden_act="gelu_pytorch_tanh")
    reference.check()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", ["deepseek-experts", "glm4-moe"])
def test_experts_without_a_shared_one_match_transformers(tmp_path: Path, name: str) -> None:
    """transformers saves tensors of no values for it."""
    reference = Checkpoint(name, tmp_path, n_shared_experts=0)
    reference.check()


@pytest.mark.parametrize("truncate", [{}, {"full_attention": False}, {"top": False}])
def test_gemma4_with_yarn_matches_transformers(tmp_path: Path, truncate: dict[str, bool]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0}
    full = yarn | ({"truncate": False} if "full_attention" in truncate else {})
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    reference = Checkpoint("gemma4-own-values", tmp_path, rope_parameters=rope | ({"truncate": False} if "top" in truncate else {}))
    reference.check(PIECES["chunked prefill"])


SHORT, LONG = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 10, "truncate": False, "beta_fast": 4.0},
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 10},
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_a_text_as_long_as_a_scaled_context_matches_transformers(tmp_path: Path, family: str, kind: str) -> None:
    trained = LENGTH // 2 if kind == "dynamic" else LENGTH
    rope = {"rope_type": kind, "rope_theta": 500.0, **SCALINGS[kind]}
    reference = Checkpoint(family, tmp_path, max_position_embeddings=trained, rope_parameters=rope)
    runner = Runner(loaded(tmp_path), 16)
    assert runner.model.config.max_context_len == LENGTH
    assert_same_logits(runner.in_pieces(reference.ids, PIECES["decode"]), reference.logits)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("pieces", PIECES)
def test_logits_match_transformers(checkpoint: Checkpoint, served: DecoderModel, pieces: str, page_size: int) -> None:
    logits = Runner(served, page_size).in_pieces(checkpoint.ids, PIECES[pieces])
    assert logits.dtype == torch.float32
    assert_same_logits(logits, checkpoint.logits)
    assert torch.equal(logits.argmax(-1), checkpoint.logits.argmax(-1))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-moe",
        "qwen2-moe",
        "mixtral",
        "minimax-m2",
        "deepseek-experts",
        "glm4-moe",
        "gpt-oss",
        "ernie-moe",
        "exaone-moe",
        "gemma3-with-vision",
    ],
)
def test_tensors_named_as_in_memory_load(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint(family, tmp_path)
    checkpoint.reference.save_pretrained(tmp_path, save_original_format=False)
    checkpoint.check()


def test_the_greedy_pass_stores_the_tokens_and_logits_that_it_is_given_room_for(served: DecoderModel) -> None:
    model, hidden = served, torch.randn(5, 64)
    tokens, scores = torch.empty(5, dtype=torch.int64), torch.empty(5, model.config.vocab_size)
    with torch.inference_mode():
        want = model.logits(hidden)
        assert model.greedy(hidden, tokens, scores) is tokens
        assert torch.equal(model.greedy(hidden), tokens)
    assert torch.equal(scores, want)
    assert torch.equal(tokens, want.argmax(-1))


def test_greedy_tokens_match_generate(checkpoint: Checkpoint, served: DecoderModel) -> None:
    runner, prompt = Runner(served, 16), checkpoint.ids[:11]
    seen = torch.ones(1, 11, dtype=torch.int64)  # else a 0 in the prompt is taken for padding
    expected = checkpoint.reference.generate(
        prompt[None], attention_mask=seen, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert isinstance(expected, torch.Tensor)
    tokens = prompt.tolist()
    logits = runner.logits(prompt, 0, EXTEND)
    for _ in range(20):
        tokens.append(int(logits[-1].argmax()))
        logits = runner.logits(torch.tensor(tokens[-1:]), len(tokens) - 1, DECODE)
    assert tokens == expected[0].tolist()


def test_hidden_states_are_those_entering_the_layers(checkpoint: Checkpoint) -> None:
    hidden, aux = Runner(loaded(checkpoint.folder), 16).hidden(checkpoint.ids, 0, EXTEND, aux=(0, 2))
    assert aux is not None
    torch.testing.assert_close(aux, torch.cat((checkpoint.hidden[0][0], checkpoint.hidden[2][0]), dim=1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(hidden, checkpoint.hidden[3][0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wanted", [[17, 39], [39], [0, 20, 21, 39], []])
def test_wanted_states_are_those_of_a_pass_over_all_tokens(checkpoint: Checkpoint, served: DecoderModel, wanted: list[int]) -> None:
    whole, part = Runner(served, 16), Runner(loaded(checkpoint.folder), 16)
    every, streams = whole.hidden(checkpoint.ids, 0, EXTEND, aux=(0, 2))
    found, same = part.hidden(checkpoint.ids, 0, EXTEND, aux=(0, 2), wanted=torch.tensor(wanted, dtype=torch.int64))
    assert found.shape == (len(wanted), 64)
    torch.testing.assert_close(found, every[wanted], rtol=1e-4, atol=1e-4)
    assert streams is not None
    assert same is not None
    assert torch.equal(same, streams)
    assert all(torch.equal(own, other) for own, other in zip(part.caches, whole.caches, strict=True)), "KV is written for all tokens"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "qwen2-moe"])
def test_wanted_states_of_quantized_weights_have_the_same_bits(tmp_path: Path, family: str, quantization: str) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 64, "num_experts": 16}
    checkpoint = Checkpoint(family, tmp_path, **sizes, initializer_range=0.05)
    runner = Runner(loaded(tmp_path, quantization), 16)
    every = runner.hidden(checkpoint.ids, 0, EXTEND)[0]
    for wanted in ([39], [3, 39], list(range(33))):
        found = runner.hidden(checkpoint.ids, 0, EXTEND, wanted=torch.tensor(wanted))[0]
        assert torch.equal(found, every[wanted]), wanted


@pytest.mark.parametrize("family", ["deepseek-experts", "glm4-flash", "glm4-moe", "qwen2-moe"])
def test_a_shared_expert_computes_the_same_in_the_stack_and_beside_it(tmp_path: Path, family: str) -> None:
    reference = Checkpoint(family, tmp_path)
    stacked, beside = loaded(tmp_path), loaded(tmp_path, fuse_shared=False)
    assert all(mlp.shared is not None and mlp.experts.count == 8 for mlp in beside.sparse_mlps)
    fused = family != "qwen2-moe"  # whose shared expert has a gate and a width of its own
    assert all((mlp.router.rule.shared, mlp.experts.count) == (fused, 8 + fused) for mlp in stacked.sparse_mlps)
    for mlp in stacked.sparse_mlps if fused else ():
        assert mlp.shared is not None
        assert mlp.shared.down_proj.weight.data_ptr() == mlp.experts.down.weight[8].data_ptr(), "no copy"
    assert stacked.expected_weights() == beside.expected_weights()
    assert stacked.weight_bytes == beside.weight_bytes
    assert [mlp.active_parameters for mlp in stacked.sparse_mlps] == [mlp.active_parameters for mlp in beside.sparse_mlps]
    found, expected = (Runner(model, 16).in_pieces(reference.ids, PIECES["verify"]) for model in (stacked, beside))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def outside_the_chain(model: DecoderModel) -> Iterator[Linear]:
    """Linear layers that decode passes run otherwise than by a GEMM of their own, or at no fixed place."""
    for layer in model.layers:
        if isinstance(layer.attention, LatentAttention):
            yield layer.attention.kv_b_proj
        if isinstance(layer, Block) and isinstance(layer.mlp, SparseMlp) and layer.mlp.shared is not None:
            yield layer.mlp.shared.down_proj


def test_int8_stays_close_to_the_weights_it_stands_for(checkpoint: Checkpoint) -> None:
    exact = loaded(checkpoint.folder)
    quantized, kept, delta = loaded(checkpoint.folder, "int8"), list[int](), exact.config.delta
    for mine, its in zip(quantized.gemms(), exact.gemms(), strict=True):
        if mine.linear.scheme.name == "none":
            kept.append(mine.linear.out_features)
            assert torch.equal(mine.linear.weight, its.linear.weight)
            continue
        assert mine.linear.scheme.name == "int8"
        if mine.op != "logits":
            its.linear.weight.copy_(Int8().dequantize(mine.linear.storage, torch.float32))
    gates = [] if delta is None else [2 * delta.num_value_heads] * sum(delta.layers)
    assert kept == gates, "only the gates of linear attention keep 16 bits"
    for mine, its in zip(outside_the_chain(quantized), outside_the_chain(exact), strict=True):
        its.weight.copy_(Int8().dequantize(mine.storage, torch.float32))
    for mine, its in zip(quantized.sparse_mlps, exact.sparse_mlps, strict=True):
        its.experts.gate_up.weight.copy_(Int8().dequantize(mine.experts.gate_up, torch.float32))
        its.experts.down.weight.copy_(Int8().dequantize(mine.experts.down, torch.float32))
        for mlp in (mine, its):
            mlp.router.weight.zero_()  # else rounding would change the choice of some experts
    with torch.inference_mode():
        hidden = Runner(exact, 16).hidden(checkpoint.ids, 0, EXTEND)[0]
        expected = hidden @ Int8().dequantize(quantized.lm_head.storage, torch.float32).T * exact.config.logit_scale
    logits = Runner(quantized, 16).in_pieces(checkpoint.ids, PIECES["decode"])
    difference = (logits - expected).norm() / expected.norm()
    assert difference < 0.05, "bfloat16 inputs are all that separates the two"
    assert torch.equal(quantized.embed, exact.embed), "the lookup table is not quantised"


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "qwen2-moe"])
def test_an_int8_model_gives_a_token_the_same_bits_in_every_window(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint(family, tmp_path, hidden_size=512, moe_intermediate_size=128, num_experts=16, initializer_range=0.05)
    model = loaded(tmp_path, "int8")
    alone = Runner(model, 16).in_pieces(checkpoint.ids, PIECES["decode"])[20:]
    for width in (2, 4, 10):
        pieces = [(20, EXTEND), *[(width, VERIFY)] * (20 // width)]
        assert torch.equal(Runner(model, 16).in_pieces(checkpoint.ids, pieces)[20:], alone), width


def test_dummy_weights_depend_on_the_seed_alone_and_stay_finite(checkpoint: Checkpoint) -> None:
    config = load_hf_config(checkpoint.folder)

    def logits(seed: int) -> torch.Tensor:
        model = build_model(config, TorchOps(), torch.float32, CPU)
        model.load(dummy_weights(model.expected_weights(), torch.float32, CPU, seed))
        return Runner(model, 16).logits(checkpoint.ids, 0, EXTEND)

    first = logits(1)
    assert torch.isfinite(first).all()
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(2))


def tiny(name: str = "llama", quantization: str | None = None) -> DecoderModel:
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=11, hidden_size=8, intermediate_size=8, num_layers=1, num_q_heads=2, num_kv_heads=1,
        head_dim=4, rms_eps=1e-6, rope_theta=10000.0, rope_scaling=None, max_context_len=8, tie_embeddings=name == "tied", qkv_bias=False,
        o_bias=False, mlp_bias=False, qk_norm=False, window=(-1,), eos_ids=(), bos_id=None, dtype="float32",
    )  # fmt: skip
    return build_model(config, TorchOps(), torch.float32, CPU, quantization)


def test_loading_names_what_is_missing_and_what_is_unexpected() -> None:
    model = tiny()
    weights = {name: torch.zeros(shape) for name, shape in model.expected_weights().items()}
    del weights["model.layers.0.self_attn.k_proj.weight"]
    weights["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(4)
    with pytest.raises(
        ConfigError, match=r"lacks model\.layers\.0\.self_attn\.k_proj\.weight and has unexpected model\.layers\.0\.self_attn\.k_proj\.bias"
    ):
        model.load(weights.items())


def test_loading_names_a_wrong_shape() -> None:
    model = tiny()
    weights = {name: torch.zeros(shape) for name, shape in model.expected_weights().items()}
    weights["model.norm.weight"] = torch.zeros(9)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[9\]; config.json asks for \[8\]"):
        model.load(weights.items())


def test_loading_names_a_tensor_with_nan() -> None:
    model = tiny()
    weights = {name: torch.zeros(shape) for name, shape in model.expected_weights().items()}
    weights["model.norm.weight"][3] = torch.nan
    with pytest.raises(ConfigError, match=r"model\.norm\.weight holds NaN; the checkpoint is damaged"):
        model.load(weights.items())


def test_infinities_and_large_numbers_are_no_nan() -> None:
    model = tiny()
    weights = {name: torch.zeros(shape) for name, shape in model.expected_weights().items()}
    weights["model.norm.weight"][:2] = torch.tensor([torch.inf, -torch.inf])
    weights["model.embed_tokens.weight"][:5], weights["model.embed_tokens.weight"][5:] = 3e38, -3e38
    model.load(weights.items())
    assert model.embed[0, 0] == 3e38


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_loading_names_a_tensor_whose_infinity_has_no_scale(quantization: str) -> None:
    model, name = tiny(quantization=quantization), "model.layers.0.mlp.down_proj.weight"
    weights = {name: torch.full(shape, 3e38) for name, shape in model.expected_weights().items()}
    weights[name][0, 0] = -torch.inf
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} holds infinity where numbers must be finite"):
        model.load(weights.items())


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_nan_among_e4m3_numbers_is_found(bits: int) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    whole = every[(every & 0x7F) != 0x7F]
    assert not holds_nan(whole.view(torch.float8_e4m3fn))
    assert not holds_nan(whole[:0].view(torch.float8_e4m3fn))
    damaged = torch.cat([whole, torch.tensor([bits], dtype=torch.uint8)]).view(torch.float8_e4m3fn)
    assert damaged.float().isnan().sum() == 1
    assert holds_nan(damaged)


def test_a_tied_model_shares_its_table_and_ignores_a_saved_head() -> None:
    model = tiny("tied")
    weights = {name: torch.ones(shape) for name, shape in model.expected_weights().items()}
    assert "lm_head.weight" not in weights
    model.load([*weights.items(), ("lm_head.weight", torch.zeros(11, 8)), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(2))])
    assert model.lm_head.weight.data_ptr() == model.embed.data_ptr()
    assert model.lm_head.weight.shape == model.embed.shape
    assert torch.all(model.embed == 1)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
QWEN2_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 6}


GEMMA3_RAW = {"architectures": ["Gemma3ForCausalLM"], **GEMMA3}
GEMMA4_RAW = {"architectures": ["Gemma4ForCausalLM"], **GEMMA4, "rope_parameters": None}
HUNYUAN_RAW = {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 8, "moe_topk": [2, 2, 2]}
MINIMAX_RAW = {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 16, "num_local_experts": 8}


def write_config(folder: Path, **changes: object) -> Path:
    raw = {**LlamaConfig(**COMMON).to_dict(), "architectures": ["LlamaForCausalLM"], **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": []}, "must name exactly one model class"),
        ({"hidden_size": "absent"}, "hidden_size is missing; it must be a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads, 3"),
        ({"hidden_act": "gelu"}, "only 'silu' is supported"),
        ({"is_causal": False}, "is_causal is false; only causal attention is supported"),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, "rope scaling 'mrope' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters differs between layers; only for Gemma 4"),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}},
            "text_config.model_type is 'mistral4'; only 'mistral' and 'ministral3' are supported",
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": ["mistral"]}},
            r"text_config.model_type is \['mistral'\]; only",
        ),
        *(
            ({"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"llama_4_scaling_beta": beta}}, rf"scaling_beta is {said}")
            for beta, said in ((-0.1, "-0.1; it must be a positive number"), (1e30, r"1e\+30; at most 1000 is supported"))
        ),
        ({"rope_scaling": {"sliding_attention": {"factor": 2.0}}}, "rope_scaling differs between layers; only for Gemma 4"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantized \(quantization_config\.quant_method: hqq\), which is not"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "quantization_config.fmt: e5m2"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"blocks of \[64, 64\]; only \[128, 128\]"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": "lm_head"}}, "ignored_layers is 'lm_head'; it must be a list"),
        ({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [1]}}, "modules_to_not_convert is "),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:("]}}, "which is not a regular expression"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method: an unnamed scheme"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config.config_groups must be an object"),
        (
            {"compression_config": COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}}},
            "config_groups.a.weights: int of 3 bits",
        ),
        (
            {"compression_config": COMPRESSED | {"config_groups": {"a": {"weights": {"strategy": "group"}}}}},
            "a.weights: unnamed numbers of unknown bits",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a positive number"),
        ({"rope_parameters": "absent", "rope_theta": 0}, "rope_theta is 0; it must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta is nan"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor is 'two'; it must be a positive number"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "rope scaling .* is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1e30}}, r"factor is 1e\+30 for a context of 128 tokens"),
        ({"max_position_embeddings": 2 * 10**9}, "give a context of 2,000,000,000 tokens; at most 8,388,608 are supported. Correct"),
        ({"rope_parameters": "twice"}, "rope_parameters is 'twice'; it must be an object"),
        ({"rope_parameters": "absent", "rope_scaling": [2.0]}, r"rope_scaling is \[2.0\]; it must be an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list of them"),
        ({"bos_token_id": [{}]}, "bos_token_id is "),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is larger than"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 10000"),
        ({"hidden_size": 10**400}, "hidden_size is larger than"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1"),
        ({"max_position_embeddings": 1e400}, "max_position_embeddings is inf"),
        ({"eos_token_id": 10**30}, "eos_token_id is "),
        ({**QWEN2_WINDOW, "max_window_layers": 10**30}, "max_window_layers is larger than"),
        ({**QWEN2_WINDOW, "max_window_layers": "all"}, "max_window_layers is 'all'; it must be zero or a positive integer"),
        ({**QWEN2_WINDOW, "layer_types": [["full_attention"]] * 3}, "layer_types must name"),
        ({**QWEN2_WINDOW, "layer_types": "full_attention"}, "layer_types must name"),
        (
            {**GEMMA4_RAW, "hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input is 256; this variant of Gemma 4 is not supported",
        ),
        ({**GEMMA3_RAW, "use_bidirectional_attention": True}, "true, as in EmbeddingGemma; only causal attention is supported"),
        ({**GEMMA3_RAW, "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}, "only causal attention is supported"),
        ({**GEMMA3_RAW, "architectures": ["Gemma2ForCausalLM"], "rope_parameters": None, "sliding_window": None}, "sliding_window is null"),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, "residual_multiplier is 0; it must be a positive number"),
        ({"architectures": ["ArceeForCausalLM"]}, "hidden_act is 'silu'; only 'relu2' is supported"),
        ({**GEMMA3_RAW, "architectures": ["Olmo3ForCausalLM"], "sliding_window": None}, "sliding_window is null"),
        (
            {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 6, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern is 'LLLG'; it must be a positive integer",
        ),
        ({**GEMMA3_RAW, "hidden_activation": "silu"}, "only 'gelu_pytorch_tanh' is supported"),
        ({**GEMMA3_RAW, "sliding_window": None}, "sliding_window is null; it must be a positive integer"),
        ({**GEMMA3_RAW, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters must hold full_attention or sliding_attention"),
        ({**GEMMA4_RAW, "num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; this variant"),
        (
            {**GEMMA4_RAW, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts is 5; it must be at most num_experts, 4",
        ),
        ({**GEMMA4_RAW, "hidden_size_per_layer_input": "absent"}, "hidden_size_per_layer_input is 256; this variant"),
        ({**GEMMA4_RAW, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "must hold sliding_attention with its rope_theta"),
        ({**GEMMA4_RAW, "per_layer_config": {"1": {"head_dim": 32}}}, "must give all full_attention layers, and no other, the same"),
        ({**GEMMA4_RAW, "per_layer_config": {"2": {"sliding_window": 3}}}, "the same head_dim and num_key_value_heads"),
        ({"head_dim": 15}, "15 of the 15 entries of a head are rotated; the number must be even"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; it must be true or false"),
        ({**HUNYUAN_RAW, "moe_topk": [2, 2, 3]}, "moe_topk differs between layers; this is not supported"),
        ({**HUNYUAN_RAW, "use_cla": True}, "use_cla is True; only False is supported"),
        ({**HUNYUAN_RAW, "num_experts": 1, "moe_topk": [2]}, "num_experts_per_tok is 2; it must be at most num_experts, 1"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0; clipped queries, keys and values are not supported"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True}, "use_bias is True; only False is supported"),
        ({"architectures": ["Dots1ForCausalLM"], "scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        (
            {"architectures": ["ExaoneMoEForCausalLM"], "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern is 'LLLG'; it must be a positive integer",
        ),
        ({"architectures": ["ExaoneMoEForCausalLM"], "mlp_layer_types": ["sparse"]}, "mlp_layer_types must name dense or sparse"),
        ({**MINIMAX_RAW, "rotary_dim": 9}, "9 of the 16 entries of a head are rotated; the number must be even"),
        ({**MINIMAX_RAW, "rotary_dim": 32}, "32 of the 16 entries of a head are rotated"),
        ({**MINIMAX_RAW, "num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most num_local_experts, 8"),
        ({**GEMMA4_RAW, "use_bidirectional_attention": "all"}, "only causal text is supported"),
        ({**GEMMA4_RAW, "hidden_activation": "silu"}, "only 'gelu_pytorch_tanh' is supported"),
        ({**GEMMA4_RAW, "layer_types": ["full_attention"] * 3}, "must name both full_attention and sliding_attention"),
        ({**GEMMA4_RAW, "attention_k_eq_v": True, "num_global_key_value_heads": 3}, "a multiple of num_global_key_value_heads, 3"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hf_config(write_config(tmp_path, **changes))


@pytest.mark.parametrize("modules", [0, 2])
def test_layers_of_minimax_for_multi_token_prediction_are_left_out(modules: int) -> None:
    raw = {**COMMON, **MINIMAX_RAW, "num_experts_per_tok": 2, "num_mtp_modules": modules}
    model = build_model(parse_hf_config(raw, "config.json"), TorchOps(), torch.float32, CPU)
    weights = {name: torch.zeros(shape) for name, shape in model.expected_weights().items()}
    further = [(f"model.layers.{layer}.eh_proj.weight", torch.zeros(1)) for layer in range(3, 3 + modules)]
    model.load([*weights.items(), *further])
    with pytest.raises(ConfigError, match=rf"has unexpected model\.layers\.{3 + modules}\.norm"):
        model.load([*weights.items(), (f"model.layers.{3 + modules}.norm", torch.zeros(1))])


def test_a_missing_folder_and_a_broken_file_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        load_hf_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hf_config(tmp_path)
    write_config(tmp_path)
    for text, why in (
        ('{"eos_token_id": "</s>"}', ": eos_token_id is '</s>'"),
        ('{"eos_token_id": 1e400}', ": eos_token_id is inf"),
        ("[" * 100_000, ""),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"generation_config\.json{why}"):
            load_hf_config(tmp_path)


def test_the_older_form_of_rope_fields_means_the_same(tmp_path: Path) -> None:
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    newer = load_hf_config(write_config(tmp_path, rope_parameters=LLAMA3_ROPE))
    older = load_hf_config(write_config(tmp_path, rope_parameters="absent", rope_theta=500.0, rope_scaling=scaling))
    assert newer == older
    assert newer.rope_theta == 500.0
    assert newer.rope_scaling is not None


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    both = load_hf_config(write_config(tmp_path, rope_parameters=LLAMA3_ROPE, rope_theta=700.0, rope_scaling=linear))
    reference: Any = LlamaConfig.from_pretrained(tmp_path)
    assert reference.rope_parameters["rope_type"] == "linear"
    assert both.rope_scaling == RopeScaling("linear", 4.0)
    assert both.rope_theta == reference.rope_parameters["rope_theta"] == 700.0
    for nothing in (None, {}):
        assert load_hf_config(write_config(tmp_path, rope_parameters=LLAMA3_ROPE, rope_scaling=nothing)).rope_theta == 500.0


def window_of(folder: Path, architecture: str, **fields: object) -> tuple[int, ...]:
    raw = {**COMMON, "architectures": [architecture], "num_hidden_layers": 30, **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_hf_config(folder).window


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows_default_as_in_transformers(tmp_path: Path, architecture: str) -> None:
    on = {"use_sliding_window": True}
    assert window_of(tmp_path, architecture, **on, sliding_window=6) == (-1,) * 28 + (5,) * 2
    assert window_of(tmp_path, architecture, **on) == (-1,) * 28 + (4095,) * 2
    assert window_of(tmp_path, architecture, **on, sliding_window=None) == (-1,) * 30
    assert window_of(tmp_path, architecture, sliding_window=6) == (-1,) * 30


def test_mistral_windows_default_as_in_transformers(tmp_path: Path) -> None:
    assert window_of(tmp_path, "MistralForCausalLM") == (4095,) * 30
    assert window_of(tmp_path, "MistralForCausalLM", sliding_window=None) == (-1,) * 30
    assert window_of(tmp_path, "MistralForCausalLM", sliding_window=9) == (8,) * 30


def test_published_fields_of_gemma3_mean_what_they_mean_in_transformers(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, expected = load_hf_config(tmp_path), Gemma3TextConfig(**text)
    for field in ("vocab_size", "head_dim"):
        assert getattr(found, field) == getattr(expected, field)
    assert (found.num_q_heads, found.num_kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert found.max_context_len == expected.max_position_embeddings
    assert found.attn_scale == expected.query_pre_attn_scalar**-0.5
    assert found.window == tuple(1023 if kind == "sliding_attention" else -1 for kind in expected.layer_types or ())
    assert expected.rope_parameters is not None
    full, local = expected.rope_parameters["full_attention"], expected.rope_parameters["sliding_attention"]
    assert (found.rope_theta, found.rope_scaling) == (local["rope_theta"], None)
    assert found.of_layer(5).rope_theta == full["rope_theta"]
    assert found.of_layer(5).rope_scaling == RopeScaling("linear", full["factor"])
    assert (found.eos_ids, found.bos_id, found.tie_embeddings) == ((1, 106), 2, True)


@pytest.mark.parametrize(("architecture", "head_dim"), [("Qwen3ForCausalLM", 128), ("LlamaForCausalLM", 16)])
def test_a_null_head_dim_means_the_default(tmp_path: Path, architecture: str, head_dim: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, "architectures": [architecture], "head_dim": None}))
    assert load_hf_config(tmp_path).head_dim == head_dim


def test_a_model_family_takes_one_file_and_one_registry_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES_BY_NAME, "ToyForCausalLM", toy_family)
    toy = build_model(load_hf_config(write_config(tmp_path, architectures=["ToyForCausalLM"])), TorchOps(), torch.float32, CPU)
    llama = build_model(load_hf_config(write_config(tmp_path)), TorchOps(), torch.float32, CPU)
    weights = dict(dummy_weights(toy.expected_weights(), torch.float32, CPU, seed=4))
    absent = {name: torch.zeros(shape) for name, shape in llama.expected_weights().items() if name not in weights}
    assert absent, "the toy family's middle layer has no MLP"
    assert all(".layers.1.mlp." in name for name in absent)
    toy.load(weights.items())
    llama.load({**weights, **absent}.items())
    ids = torch.arange(LENGTH) % VOCAB
    got, want = (Runner(model, 16).in_pieces(ids, PIECES["verify"]) for model in (toy, llama))
    assert torch.equal(got, want)
    mlp = 3 * COMMON["hidden_size"] * COMMON["intermediate_size"]
    assert toy.active_parameters == llama.active_parameters - mlp
    assert toy.kernel_launches < llama.kernel_launches
    assert len(list(toy.gemms())) == len(list(llama.gemms())) - 2


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=[7, 5])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_hf_config(tmp_path).eos_ids == (9, 7, 5)


def test_end_tokens_that_the_model_cannot_write_are_left_out(tmp_path: Path) -> None:
    assert load_hf_config(write_config(tmp_path, eos_token_id=[-1, 7, VOCAB])).eos_ids == (7,)
    write_small_tokenizer(tmp_path)
    assert eos_ids_of(str(tmp_path), tiny_model(vocab_size=800, eos_ids=(7,))) == (7, 2)
    assert eos_ids_of(str(tmp_path), tiny_model(vocab_size=2, eos_ids=(1,))) == (1,)


@pytest.mark.parametrize("listed", [False, True])
def test_an_end_token_that_is_no_added_token_of_tokenizer_json_is_found(tmp_path: Path, listed: bool) -> None:
    write_small_tokenizer(tmp_path)
    definition, config = (json.loads((tmp_path / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] != config["eos_token"]]
    if listed:
        config["added_tokens_decoder"] = {"2": {"content": config["eos_token"], "special": True}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert eos_ids_of(str(tmp_path), tiny_model(vocab_size=800, eos_ids=())) == (reference(tmp_path).eos_token_id,) == (2,)
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert eos_ids_of(str(tmp_path), tiny_model(vocab_size=800, eos_ids=(7,))) == (7,)


def test_a_file_that_names_no_end_tokens_changes_nothing(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id="absent")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_hf_config(tmp_path).eos_ids == (2,)
    text = {**GEMMA4, "eos_token_id": [5, 6]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}))
    assert load_hf_config(tmp_path).eos_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_hf_config(tmp_path).eos_ids == (7, 5, 6)
