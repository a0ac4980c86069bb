"""Gemma 2: windows on every second layer, soft caps of attention scores and of logits, and norms that multiply by 1 + weight.

In 16-bit types that sum is rounded as in `gemma3`.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.models import gemma_parts
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import required_windows

DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    window = required_windows(fields, lambda layer: layer % 2 == 0)
    return replace(gemma_parts.gemma_config(fields, window), attn_softcap=gemma_parts.softcap(fields, "attn_logit_softcapping"))


block = gemma_parts.block
