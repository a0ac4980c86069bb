"""Builds a model from its architecture."""

from __future__ import annotations

import torch

from runtime.errors import ConfigError
from runtime.layers.linear import Int8Linear, Linear
from runtime.layers.ops import BlockOps
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.hf_config import FAMILIES


def build_model(
    config: ModelConfig, ops: BlockOps, dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> DecoderModel:
    """A model with weights allocated and not yet loaded.

    Args:
        quantization: None, or "int8" for weight-only int8 linears and LM head (CPU).

    Raises:
        ConfigError: the architecture or the quantisation is not supported here.
    """
    if config.architecture not in FAMILIES:
        raise ConfigError(f"architecture {config.architecture} is not supported; supported are {', '.join(FAMILIES)}")
    return DecoderModel(config, ops, dtype, device, linear_class(quantization, device))


def linear_class(quantization: str | None, device: torch.device) -> type[Linear]:
    """The kind of linear layer that a quantisation asks for.

    Raises:
        ConfigError: it is unknown, or not for this device.
    """
    if quantization is None:
        return Linear
    if quantization != "int8":
        raise ConfigError(f"--quantization {quantization!r} is unknown; it must be int8")
    if device.type != "cpu":
        raise ConfigError(f"--quantization int8 works on --device cpu only, not on {device.type}; leave it out")
    return Int8Linear
