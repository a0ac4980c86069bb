"""GLM-4 and GLM-Edge as transformers writes them: neighbouring entries of half of each head rotate together; gate and up are one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5,
    "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; `attention_bias` covers q, k and v, but not the output projection."""
    return decoder_config(fields, partial_rotary=True, qkv_bias=fields.flag("attention_bias"), rope_interleaved=True)


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    return parts.block(prefix, parts.attention(prefix + "self_attn.", layer), parts.gated_mlp(prefix + "mlp.", fused=True))
