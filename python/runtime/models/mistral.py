"""Mistral: no biases, and a sliding window on every layer unless the file says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.hf_config import ConfigFields, decoder_config, sliding_windows

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return decoder_config(fields, window=sliding_windows(fields, full_layers=0))


def block(parts: ModelParts, layer: int) -> Block:
    """Layer `layer`."""
    return parts.dense_block(f"model.layers.{layer}.", layer)
