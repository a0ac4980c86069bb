"""GLM-4.5, 4.6 and 4.7: attention with rotary embedding on part of each head, and DeepSeek's experts and MTP layer."""

from __future__ import annotations

from runtime.models import deepseek, llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config

DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; `attention_bias` covers q, k and v, but not the output projection."""
    moe = deepseek.experts(fields, deepseek.layers_with_experts(fields))
    bias, norms = fields.flag("attention_bias"), fields.flag("use_qk_norm")
    return deepseek.with_mtp(fields, decoder_config(fields, moe=moe, partial_rotary=True, qkv_bias=bias, qk_norm=norms))


block = llama.block
