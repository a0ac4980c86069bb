"""Arcee (AFM): Llama's attention, and MLPs without a gate, whose activation is the square of ReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    fields.only("hidden_act", "relu2")
    return decoder_config(fields, **attention_bias(fields), mlp_bias=fields.flag("mlp_bias"), reads_hidden_act=False)


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    attention = parts.attention(prefix + "self_attn.", layer)
    return parts.block(prefix, attention, parts.squared_relu_mlp(prefix + "mlp."))
