"""Solar Open: Llama's attention with DeepSeek-V3's experts in every layer."""

from __future__ import annotations

from runtime.models import deepseek, llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config

DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; no layer is dense, so files need no `intermediate_size`. `attention_bias` does not cover the output projection."""
    fields = fields.filled(intermediate_size=fields.positive("moe_intermediate_size"))
    moe = deepseek.experts(fields, (True,) * fields.num_layers())
    return decoder_config(fields, moe=moe, partial_rotary=True, qkv_bias=fields.flag("attention_bias"))


block = llama.block
