"""Qwen 3.5, the text decoder: three layers with linear attention for each one with full attention, whose output has a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models import delta_fields
from runtime.models.config import ModelConfig, MoeConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import OUTER_FIELDS, attention_bias, decoder_config

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = delta_fields.DELTA_DEFAULTS | {"num_key_value_heads": 4}
PREFIX = "model.language_model."
"""Of the decoder's tensors beside a vision tower."""
OTHER_PARTS = ("model.visual.", "mtp.")
"""Prefixes of tensors that the decoder does not use."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture of the text decoder, from a text-only or a multimodal model."""
    return parse_decoder(fields, text_fields(fields))


def text_fields(fields: ConfigFields) -> ConfigFields:
    """The fields of the text decoder."""
    return fields.within("text_config", OUTER_FIELDS) if fields.get("text_config", {}) else fields


def parse_decoder(fields: ConfigFields, text: ConfigFields, moe: MoeConfig | None = None) -> ModelConfig:
    """The architecture of the text decoder that `text` describes. For text its three rotary positions are equal, so that it has the usual
    rotary embedding.
    """
    multimodal = text is not fields
    config = decoder_config(text, partial_rotary=True, moe=moe, qk_norm=True, **attention_bias(text))
    return replace(
        delta_fields.with_linear_attention(config, text),
        tie_embeddings=fields.flag("tie_word_embeddings") or text.flag("tie_word_embeddings"),
        weight_prefix=PREFIX if multimodal else "model.",
        unused_weights=OTHER_PARTS,
    )


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    return delta_fields.block(parts, prefix, layer)
