"""DeepSeek-V3 and R1: latent attention, the first layers with a dense MLP, and a layer for multi-token prediction."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from runtime.models.config import LatentConfig, ModelConfig, MtpConfig
from runtime.models.hf_config import ConfigFields, decoder_config
from runtime.models.rope_fields import mscale

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return latent_config(fields)


def latent_config(fields: ConfigFields) -> ModelConfig:
    """The architecture of a model with DeepSeek's attention, under its field names.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    rope_dim, bias, q_rank = fields.positive("qk_rope_head_dim"), fields.flag("attention_bias"), fields.optional_positive("q_lora_rank")
    if bias and q_rank is None:
        raise fields.error("attention_bias is true without q_lora_rank; this combination is not supported")
    interleaved = bool(fields.get("rope_interleave", True))
    config = decoder_config(fields, head_dim=rope_dim, qkv_bias=bias, o_bias=bias, rope_interleaved=interleaved)
    nope_dim = fields.positive("qk_nope_head_dim")
    scaling = config.rope_scaling
    # The rotary table holds the quotient of both factors; all scores are scaled by the other one, for queries and keys.
    correction = 1.0 if scaling is None else mscale(scaling.factor, scaling.mscale_all_dim)
    scale = (nope_dim + rope_dim) ** -0.5 * correction**2
    latent = LatentConfig(q_rank, fields.positive("kv_lora_rank"), nope_dim, fields.positive("v_head_dim"), scale)
    # Published checkpoints hold the layer for multi-token prediction behind the model's own.
    mtp = MtpConfig(f"model.layers.{config.num_layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
    held = fields.count("num_nextn_predict_layers", 0) > 0
    return dataclasses.replace(config, head_dim=rope_dim, latent=latent, mtp=mtp if held else None, unused_weights=(mtp.prefix,))


def block(parts: ModelParts, layer: int) -> Block:
    """Layer `layer`."""
    return latent_block(parts, f"model.layers.{layer}.", layer)


def mtp_block(parts: ModelParts, prefix: str) -> Block:
    """The block of the layer for multi-token prediction."""
    return latent_block(parts, prefix, 0)


def latent_block(parts: ModelParts, prefix: str, layer_id: int) -> Block:
    """The block of tensors `prefix`*."""
    from runtime.models.block import Block
    from runtime.models.latent_parts import latent_attention

    attn_norm = parts.norm(prefix + "input_layernorm.weight")
    attention = latent_attention(parts, prefix + "self_attn.", layer_id)
    mlp_norm = parts.norm(prefix + "post_attention_layernorm.weight")
    return Block(attention, parts.gated_mlp(prefix + "mlp."), attn_norm, mlp_norm)
