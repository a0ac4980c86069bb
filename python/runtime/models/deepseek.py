"""DeepSeek-V3 and R1: latent attention, experts chosen within groups, and a multi-token prediction layer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from runtime.models.config import LatentConfig, ModelConfig, MoeConfig, MtpConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.rope_fields import mscale

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts


DENSE_LAYERS = 3
"""First layers without experts, where the file does not say (transformers' default)."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    dense = fields.count("first_k_dense_replace", DENSE_LAYERS)
    return latent_config(fields, tuple(layer >= dense for layer in range(fields.num_layers())))


def latent_config(fields: ConfigFields, sparse: tuple[bool, ...]) -> ModelConfig:
    """The architecture of a model with DeepSeek's attention and experts, under its field names.

    Args:
        sparse: whether each layer has experts; the layer for multi-token prediction has them in any case.

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
    first, held = config.num_layers, fields.count("num_nextn_predict_layers", 0)
    mtp = MtpConfig(f"model.layers.{first}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
    quant = config.quant
    return dataclasses.replace(
        config,
        head_dim=rope_dim,
        latent=latent,
        moe=experts(fields, sparse),
        mtp=mtp if held else None,
        unused_weights=tuple(f"model.layers.{layer}." for layer in range(first, first + max(held, 1))),
        quant=None if quant is None else dataclasses.replace(quant, kept=(*quant.kept, mtp.proj)),
    )


def experts(fields: ConfigFields, sparse: tuple[bool, ...]) -> MoeConfig | None:
    """The sparse MLPs: sigmoid scores, a bias for the choice alone, and groups.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    if fields.get("n_routed_experts", None) is None:
        return None
    for name, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.get(name, supported) != supported:
            raise fields.error(f"{name} is {fields.get(name, None)!r}; only {supported!r} is supported")
    count, groups, inner = fields.positive("n_routed_experts"), fields.positive("n_group", 1), fields.positive("moe_intermediate_size")
    if count % groups:
        raise fields.error(f"n_routed_experts is {count}; it must be a multiple of n_group, {groups}")
    return MoeConfig(
        num_experts=count,
        top_k=fields.positive("num_experts_per_tok"),
        intermediate_size=inner,
        scoring="sigmoid",
        renormalize=bool(fields.get("norm_topk_prob", True)),
        scaling=fields.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=fields.positive("topk_group", 1),
        shared_intermediate_size=inner * fields.count("n_shared_experts", 0),
        layers=sparse,
    )


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
    from runtime.models.sparse import SparseNames

    attn_norm = parts.norm(prefix + "input_layernorm.weight")
    attention = latent_attention(parts, prefix + "self_attn.", layer_id)
    mlp_norm = parts.norm(prefix + "post_attention_layernorm.weight")
    moe = parts.config.moe
    sparse = moe is not None and moe.layers[layer_id]
    mlp = parts.sparse_mlp(SparseNames.usual(prefix + "mlp.")) if sparse else parts.gated_mlp(prefix + "mlp.")
    return Block(attention, mlp, attn_norm, mlp_norm)
