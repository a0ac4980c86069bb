"""Qwen 2 with sparse MLPs: a softmax router, and a shared expert with a sigmoid gate; some layers may be dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models import qwen2
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.moe_fields import moe_fields, sparse_layers

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "num_key_value_heads": 16, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "qkv_bias": True,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    moe = moe_fields(
        fields,
        ("num_experts",),
        renormalize=fields.flag("norm_topk_prob"),
        layers=sparse_layers(fields),
        shared=fields.positive("shared_expert_intermediate_size"),
    )
    window = qwen2.windows(fields, lambda layer, bound: layer % 2 == 0 and layer < bound)
    return decoder_config(fields, qkv_bias=fields.flag("qkv_bias"), window=window, moe=moe)


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.sparse import SparseNames

    return parts.usual_block(prefix, layer, SparseNames.usual(prefix + "mlp.", "shared_expert.", "shared_expert_gate"))
