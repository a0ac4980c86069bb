"""DeepSeek-V3 and R1: latent attention, experts chosen within groups, and a multi-token prediction layer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from runtime.models.config import LatentConfig, ModelConfig, MoeConfig, MtpConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.moe_fields import expert_groups, moe_fields
from runtime.models.rope_fields import mscale

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts


LAYER_DEFAULTS = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_interleave": True, "n_shared_experts": 1, "norm_topk_prob": True,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""Defaults of all families with DeepSeek's layers."""
DEFAULTS = {
    **LAYER_DEFAULTS, "max_position_embeddings": 4096, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return with_mtp(fields, latent_config(fields, experts(fields, layers_with_experts(fields))))


def layers_with_experts(fields: ConfigFields) -> tuple[bool, ...]:
    """Whether each layer has experts: all but the first `first_k_dense_replace` have."""
    dense = fields.count("first_k_dense_replace")
    return tuple(layer >= dense for layer in range(fields.num_layers()))


def latent_config(fields: ConfigFields, moe: MoeConfig | None) -> ModelConfig:
    """The architecture of a model with DeepSeek's attention, under its field names, and the sparse MLPs `moe`.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    rope_dim, bias, q_rank = fields.positive("qk_rope_head_dim"), fields.flag("attention_bias"), fields.optional_positive("q_lora_rank")
    if fields.given("head_dim") and fields.positive("head_dim") != rope_dim:
        raise fields.error(f"head_dim is {fields.positive('head_dim')}; it must be that of qk_rope_head_dim, {rope_dim}, or absent")
    if bias and q_rank is None:
        raise fields.error("attention_bias is true without q_lora_rank; this combination is not supported")
    interleaved = fields.nullable_flag("rope_interleave")
    config = decoder_config(fields, head_dim=rope_dim, qkv_bias=bias, o_bias=bias, rope_interleaved=interleaved)
    nope_dim = fields.positive("qk_nope_head_dim")
    scaling = config.rope_scaling
    # The rotary table holds the ratio of the two YaRN factors; the scores are scaled by the second one, squared for queries and keys.
    correction = 1.0 if scaling is None else mscale(scaling.factor, scaling.mscale_all_dim)
    scale = (nope_dim + rope_dim) ** -0.5 * correction**2
    latent = LatentConfig(q_rank, fields.positive("kv_lora_rank"), nope_dim, fields.positive("v_head_dim"), scale)
    return dataclasses.replace(config, latent=latent, moe=moe)


def with_mtp(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    """The architecture with the first multi-token prediction layer of its checkpoint, if it holds any.

    Raises:
        ConfigError: the field that counts these layers is not of its type.
    """
    # Published checkpoints number them after the model's own layers.
    first, held = config.num_layers, fields.count(fields.named("num_mtp_layers", "num_nextn_predict_layers"), 0)
    mtp = MtpConfig(f"model.layers.{first}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
    unused = tuple(f"model.layers.{layer}." for layer in range(first, first + max(held, 1)))
    return dataclasses.replace(config, mtp=mtp if held else None, unused_weights=unused)


def experts(fields: ConfigFields, sparse: tuple[bool, ...]) -> MoeConfig | None:
    """The sparse MLPs: sigmoid scores, a bias that affects only the choice of experts, and expert groups.

    Args:
        sparse: whether each layer has experts; the layer for multi-token prediction has them in any case.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    if (name := count_field(fields)) is None:
        return None
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    return grouped_experts(fields, name, sparse, shared_size(fields))


def grouped_experts(fields: ConfigFields, count: str, sparse: tuple[bool, ...], shared: int) -> MoeConfig:
    """As `experts`, for a family that may name the fields of its experts otherwise.

    Args:
        count: the field that holds the number of experts.
        shared: intermediate size of the shared expert.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    renormalize = fields.nullable_flag("norm_topk_prob")
    moe = moe_fields(fields, (count,), scoring="sigmoid", correction=True, renormalize=renormalize, layers=sparse, shared=shared)
    groups, top_groups = expert_groups(fields, count, moe.top_k)
    return dataclasses.replace(moe, scaling=fields.number("routed_scaling_factor", 1.0), num_groups=groups, top_groups=top_groups)


def count_field(fields: ConfigFields, other: str = "num_local_experts") -> str | None:
    """The field that holds the number of experts, which may have the `other` name; None if it is null, as in a dense model."""
    name = fields.named(other, "n_routed_experts")
    return None if fields.optional_positive(name) is None else name


def shared_size(fields: ConfigFields) -> int:
    """The intermediate size of the shared expert."""
    return fields.positive("moe_intermediate_size") * fields.count("n_shared_experts")


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.latent_parts import latent_attention

    return parts.block(prefix, latent_attention(parts, prefix + "self_attn.", layer), parts.mlp(prefix + "mlp.", layer))
