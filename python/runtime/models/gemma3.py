"""Gemma 3, the text decoder: layers with windows and global layers with another rotary embedding, and norms that multiply by 1 + weight.

The sum is computed in float32 and rounded once to the model's dtype. transformers multiplies by it in float32, so in 16-bit types a norm
may differ by that rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models import gemma_parts
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import OUTER_FIELDS, required_windows
from runtime.models.rope_fields import rope_of_kind, with_full_rope

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import SandwichBlock
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
"""Published files of models with a vision tower leave out the vocabulary and the number of heads too."""
PREFIX, NEWER_PREFIX = "language_model.model.", "model.language_model."
"""Of the decoder's tensors beside a vision tower: in published checkpoints, and with the names that newer transformers has in memory."""
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Prefixes of tensors that text generation does not use."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture of the text decoder, from a text-only or a multimodal model."""
    multimodal = bool(fields.get("text_config", {}))
    text = fields.within("text_config", OUTER_FIELDS) if multimodal else fields
    pattern = text.positive("sliding_window_pattern")
    window = required_windows(text, lambda layer: (layer + 1) % pattern != 0)
    local = rope_of_kind(text, "sliding_attention", text.number("rope_local_base_freq", 1e4))
    full = rope_of_kind(text, "full_attention", text.number("rope_theta", 1e6))
    return replace(
        with_full_rope(gemma_parts.gemma_config(text, window, local), full),
        qk_norm=True,
        tie_embeddings=fields.flag("tie_word_embeddings"),  # that of `text_config` is not read
        weight_prefix=PREFIX if multimodal else "model.",
        head_prefix="language_model." if multimodal else "",
        unused_weights=OTHER_PARTS if multimodal else (),
    )


def block(parts: ModelParts, prefix: str, layer: int) -> SandwichBlock:
    """Layer `layer`."""
    parts.weights.rename(NEWER_PREFIX, PREFIX)
    return gemma_parts.block(parts, prefix, layer)
