"""MiniMax M2: a sigmoid router with correction bias, norms of q and k over all heads, rotary embedding on part of each head."""

from __future__ import annotations

from dataclasses import replace

from runtime.models import mixtral
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.moe_fields import moe_fields

DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6,
    "num_local_experts": 256, "num_experts_per_tok": 8, "bos_token_id": 200034, "eos_token_id": 200020,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; published files name the rotated part of a head `rotary_dim`."""
    for name, only in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer"), ("use_qk_norm", True)):
        fields.only(name, only)
    counts = ("num_experts", "num_local_experts")
    moe = moe_fields(fields, counts, inner="intermediate_size", scoring="sigmoid", correction=True, renormalize=True)
    if (rotated := fields.optional_positive("rotary_dim")) is not None:
        fields = fields.filled(partial_rotary_factor=rotated / fields.positive("head_dim"))
    config = decoder_config(fields, moe=moe, partial_rotary=True, qk_row_norm=True)
    # Checkpoints may have layers for multi-token prediction after the others.
    held = range(config.num_layers, config.num_layers + fields.count("num_mtp_modules", 0))
    return replace(config, unused_weights=tuple(f"model.layers.{layer}." for layer in held))


block = mixtral.block
