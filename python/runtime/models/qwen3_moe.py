"""Qwen 3 with sparse MLPs: a softmax router without shared experts; some layers may be dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.moe_fields import moe_fields, sparse_layers
from runtime.models.qwen2 import windows

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    bias = fields.flag("attention_bias")
    moe = moe_fields(fields, renormalize=fields.flag("norm_topk_prob"), layers=sparse_layers(fields))
    return decoder_config(fields, qkv_bias=bias, o_bias=bias, qk_norm=True, window=windows(fields), moe=moe)


def block(parts: ModelParts, layer: int) -> Block:
    """Layer `layer`."""
    return parts.sparse_block(f"model.layers.{layer}.", layer)
