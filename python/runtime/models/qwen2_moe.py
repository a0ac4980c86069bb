"""Qwen 2 with sparse MLPs: a softmax router, and a shared expert with a sigmoid gate; some layers may be dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows
from runtime.models.moe_fields import moe_fields, sparse_layers
from runtime.models.qwen2 import MAX_WINDOW_LAYERS

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; `qkv_bias` is on unless the file says otherwise."""
    moe = moe_fields(
        fields,
        renormalize=fields.flag("norm_topk_prob"),
        layers=sparse_layers(fields),
        shared=fields.positive("shared_expert_intermediate_size"),
    )
    return decoder_config(fields, qkv_bias=bool(fields.get("qkv_bias", True)), window=windows(fields), moe=moe)


def windows(fields: ConfigFields) -> tuple[int, ...] | None:
    """The window of each layer where `use_sliding_window` is on: by `layer_types`, or else of every second of the first layers."""
    if not fields.flag("use_sliding_window"):
        return None
    if fields.get("layer_types", None) is not None:
        return sliding_windows(fields, full_layers=0)
    first = fields.count("max_window_layers", MAX_WINDOW_LAYERS)
    sliding = sliding_windows(fields, full_layers=0)
    return None if sliding is None else tuple(size if i % 2 == 0 and i < first else -1 for i, size in enumerate(sliding))


def block(parts: ModelParts, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.sparse import SparseNames

    prefix = f"model.layers.{layer}."
    return parts.sparse_block(prefix, layer, SparseNames.usual(prefix + "mlp.", "shared_expert.", "shared_expert_gate"))
