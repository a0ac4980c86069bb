"""Qwen 3 with sparse MLPs: a softmax router without shared experts; some layers may be dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import DEFAULT_WINDOW, decoder_config
from runtime.models.moe_fields import moe_fields, sparse_layers

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    bias = fields.flag("attention_bias")
    moe = moe_fields(fields, renormalize=fields.flag("norm_topk_prob"), layers=sparse_layers(fields))
    return decoder_config(fields, qkv_bias=bias, o_bias=bias, qk_norm=True, window=windows(fields), moe=moe)


def windows(fields: ConfigFields) -> tuple[int, ...] | None:
    """The window, the same for every layer; None where `use_sliding_window` is off. Unlike Qwen 3, transformers reads neither
    `layer_types` nor `max_window_layers`. The file counts the query's own key too.
    """
    absent = fields.has("sliding_window") and fields.get("sliding_window", None) is None
    if absent or not fields.flag("use_sliding_window"):
        return None
    return (fields.positive("sliding_window", DEFAULT_WINDOW) - 1,) * fields.num_layers()


def block(parts: ModelParts, layer: int) -> Block:
    """Layer `layer`."""
    return parts.sparse_block(f"model.layers.{layer}.", layer)
