"""GLM-4.7-Flash: DeepSeek's attention and MTP layer, with experts in every layer but the first."""

from __future__ import annotations

from runtime.models import deepseek
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.moe_fields import named_layers

DEFAULTS = {
    **deepseek.LAYER_DEFAULTS, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    sparse = named_layers(fields) or deepseek.layers_with_experts(fields)
    moe = deepseek.experts(fields, sparse)
    return deepseek.with_mtp(fields, deepseek.latent_config(fields, moe))


block = deepseek.block
