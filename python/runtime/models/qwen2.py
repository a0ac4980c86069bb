"""Qwen 2 and 2.5: biases on q, k and v, and a sliding window on the later layers if enabled."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows

MAX_WINDOW_LAYERS = 28
"""Layers with full attention before the first sliding one, where the file does not say (transformers' default)."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return decoder_config(fields, qkv_bias=True, window=windows(fields))


def windows(fields: ConfigFields) -> tuple[int, ...] | None:
    """The window of each layer; None where `use_sliding_window` is off."""
    if not fields.flag("use_sliding_window"):
        return None
    return sliding_windows(fields, full_layers=fields.count("max_window_layers", MAX_WINDOW_LAYERS))


block = llama.block
