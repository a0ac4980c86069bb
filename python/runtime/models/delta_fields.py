"""Reads the fields of a config.json that describe linear attention. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models.config import DeltaConfig, ModelConfig, MtpConfig
from runtime.models.config_fields import ConfigFields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts
    from runtime.models.sparse import SparseNames

KINDS = {"linear_attention": True, "full_attention": False}
MTP = MtpConfig(
    prefix="mtp.",
    block="layers.0.",
    token_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    proj="fc",
    final_norm="norm",
    # The state that the next step reads is taken after the final norm, like the target's that the first step reads.
    feeds_normed=True,
)
"""The layer for multi-token prediction: full attention and the model's MLP."""
DELTA_DEFAULTS = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "mtp_num_hidden_layers": 1,
}  # fmt: skip
"""What transformers assumes; it does not read the last field."""


def with_linear_attention(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """`config` with linear attention in the layers that have it, and with what these families share: a gate on the output of the other
    layers, norms that multiply by 1 + weight, and the layer for multi-token prediction.

    Raises:
        ConfigError: a field is missing, not of its type, or does not fit the others.
    """
    # The steps of a draft run one layer, with the target's embedding: several layers, one for each step, are left out.
    own_embedding = fields.flag("mtp_use_dedicated_embeddings")
    mtp = MTP if fields.count("mtp_num_hidden_layers", 0) == 1 and not own_embedding else None
    return replace(config, delta=_delta(fields), output_gate=True, norm_offset=1.0, mtp=mtp)


def _delta(fields: ConfigFields) -> DeltaConfig:
    keys, values = fields.positive("linear_num_key_heads"), fields.positive("linear_num_value_heads")
    if values % keys:
        raise fields.error(f"linear_num_value_heads is {values}; it must be a multiple of linear_num_key_heads, {keys}")
    width = fields.positive("linear_conv_kernel_dim")
    if width < 2:
        raise fields.error(f"linear_conv_kernel_dim is {width}; it must be at least 2")
    key_dim, value_dim = fields.positive("linear_key_head_dim"), fields.positive("linear_value_head_dim")
    return DeltaConfig(_layers(fields), keys, values, key_dim, value_dim, width)


def _layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Whether each layer has linear attention."""
    count, interval = fields.num_layers(), 1 if fields.given("layer_types") else fields.positive("full_attention_interval")
    usual = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(count)]
    kinds = fields.get("layer_types", usual)
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in tuple(KINDS) for kind in kinds):
        raise fields.error(f"layer_types must name linear_attention or full_attention for each of {count} layers")
    if "full_attention" not in kinds:
        raise fields.error("layer_types names no full_attention; at least one layer must have it")
    return tuple(KINDS[kind] for kind in kinds)


def block(parts: ModelParts, prefix: str, layer: int, names: SparseNames | None = None, fused: bool = False) -> Block:
    """Layer `layer`: linear attention, or full attention with a gate. `names` and `fused`: as for `ModelParts.mlp` and `DeltaParts`."""
    from runtime.models.delta_parts import DeltaParts

    delta, mlp = parts.config.delta, parts.mlp(prefix + "mlp.", layer, names)
    if delta is not None and delta.layers[layer]:
        return parts.block(prefix, DeltaParts(parts, prefix + "linear_attn.", fused).attention(layer), mlp)
    number = layer if delta is None else delta.layers[:layer].count(False)
    return parts.block(prefix, parts.gated_attention(prefix + "self_attn.", number), mlp)
