"""Qwen 3, dense: norms on each head's q and k, heads of 128, windows as in Qwen 2."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.qwen2 import windows

HEAD_DIM = 128


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    bias = fields.flag("attention_bias")
    return decoder_config(fields, head_dim=HEAD_DIM, qkv_bias=bias, o_bias=bias, qk_norm=True, window=windows(fields))


block = llama.block
