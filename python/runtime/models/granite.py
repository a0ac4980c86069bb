"""Granite 3 (dense): Llama's layers, with factors of embeddings, attention scores, outputs of attention and MLP, and logits."""

from __future__ import annotations

from dataclasses import replace

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields

DEFAULTS = llama.DEFAULTS


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture. As in transformers, a factor that the file leaves out is 1."""
    return replace(
        llama.parse(fields),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        attn_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


block = llama.block
