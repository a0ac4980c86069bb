"""Mistral and Ministral: no biases, and a sliding window on every layer unless config.json says otherwise."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows

DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return decoder_config(fields, window=sliding_windows(fields))


block = llama.block
