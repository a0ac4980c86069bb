"""Llama 2 and 3, and other models with their class name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; `attention_bias` and `mlp_bias` say which projections have biases."""
    return decoder_config(fields, **attention_bias(fields), mlp_bias=fields.flag("mlp_bias"))


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    return parts.usual_block(prefix, layer)
