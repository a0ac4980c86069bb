"""Qwen 2 and 2.5: biases on q, k and v, and a sliding window on the later layers if enabled."""

from __future__ import annotations

from collections.abc import Callable

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return decoder_config(fields, qkv_bias=True, window=windows(fields))


def windows(fields: ConfigFields, slides: Callable[[int, int], bool] = lambda layer, bound: layer >= bound) -> tuple[int, ...] | None:
    """Each layer's window if `use_sliding_window` is on: by `layer_types`, or else by `slides` of its number and `max_window_layers`."""
    if not fields.flag("use_sliding_window"):
        return None
    bound = fields.count("max_window_layers")
    return sliding_windows(fields, lambda layer: slides(layer, bound))


block = llama.block
