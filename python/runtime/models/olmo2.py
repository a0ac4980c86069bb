"""OLMo 2: no norms before attention and MLP, but after each, and norms of q and k over all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import SandwichBlock
    from runtime.models.parts import ModelParts

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
NORMS = (None, "post_attention", None, "post_feedforward")
"""The norms before and after attention, then before and after the MLP."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return decoder_config(fields, **attention_bias(fields), qk_row_norm=True)


def block(parts: ModelParts, prefix: str, layer: int) -> SandwichBlock:
    """Layer `layer`."""
    attention = parts.of_layer(layer).attention(prefix + "self_attn.", layer)
    return parts.sandwich_block(prefix, attention, parts.gated_mlp(prefix + "mlp."), NORMS)
