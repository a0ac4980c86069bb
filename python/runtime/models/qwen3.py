"""Qwen 3, dense: norms on each head's q and k, heads of 128, windows as in Qwen 2."""

from __future__ import annotations

from runtime.models import llama, qwen2
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config

DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return decoder_config(fields, **attention_bias(fields), qk_norm=True, window=qwen2.windows(fields))


block = llama.block
