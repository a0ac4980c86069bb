"""Tiny configurations of the families with latent attention, for transformers and for workers."""

from __future__ import annotations

from typing import Any

from runtime.models.config import LatentConfig, ModelConfig, MtpConfig
from unit.tiny import tiny_model

LATENT: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
DEEPSEEK_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5, "n_shared_experts": 1, "initializer_range": 0.2,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MTP = MtpConfig("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
"""Of `latent_model`."""


def latent_model(q_rank: int | None = 24, **changes: object) -> ModelConfig:
    """A DeepSeek-V3 of three dense layers with an MTP layer."""
    latent = LatentConfig(q_rank, kv_rank=32, nope_dim=16, value_dim=12, scale=24**-0.5)
    values: dict[str, object] = dict(
        architecture="DeepseekV3ForCausalLM",
        vocab_size=97,
        num_kv_heads=4,
        head_dim=8,
        rope_interleaved=True,
        latent=latent,
        mtp=MTP,
        unused_weights=(MTP.prefix,),
    )
    return tiny_model(**{**values, **changes})
