"""Mistral: no biases, and a sliding window on every layer unless config.json says otherwise."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return decoder_config(fields, window=sliding_windows(fields, full_layers=0))


block = llama.block
