"""Mistral Small 3.1 and later, and Ministral 3, the text decoder: the layers of Mistral or Ministral 3 beside a vision tower."""

from __future__ import annotations

from dataclasses import replace

from runtime.models import ministral3, mistral
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import OUTER_FIELDS

DEFAULTS = {**mistral.DEFAULTS, "tie_word_embeddings": True}
DECODERS = {"mistral": mistral, "ministral3": ministral3}
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
"""Prefixes of tensors that text generation does not use."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture of the text decoder."""
    text = fields.within("text_config", OUTER_FIELDS)
    kind = text.get("model_type", "mistral")
    if not isinstance(kind, str) or kind not in DECODERS:
        raise fields.error(f"text_config.model_type is {kind!r}; only {' and '.join(map(repr, DECODERS))} are supported")
    return replace(
        DECODERS[kind].parse(text.with_defaults(DECODERS[kind].DEFAULTS)),
        tie_embeddings=fields.flag("tie_word_embeddings"),  # that of `text_config` is not read
        weight_prefix="language_model.model.",
        head_prefix="language_model.",
        unused_weights=OTHER_PARTS,
    )


block = mistral.block
