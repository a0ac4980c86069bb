"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with fused projections, longrope, and a sliding window on every layer of some models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, same_window

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    config = decoder_config(fields, window=same_window(fields), partial_rotary=True)
    if config.rope_scaling is not None and config.rope_scaling.kind != "longrope":
        raise fields.error(f"rope scaling {config.rope_scaling.kind!r} is not supported; Phi-3 has only 'longrope'")
    return config


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    attention = parts.attention(prefix + "self_attn.", layer, fused=True)
    return parts.block(prefix, attention, parts.gated_mlp(prefix + "mlp.", fused=True))
