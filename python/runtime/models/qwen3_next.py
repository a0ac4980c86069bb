"""Qwen3-Next: linear attention and full attention with a gate, and sparse MLPs with a shared expert; some MLPs may be dense."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models import delta_fields
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config
from runtime.models.moe_fields import moe_fields, sparse_layers

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = delta_fields.DELTA_DEFAULTS | {
    "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    shared = fields.positive("shared_expert_intermediate_size")
    layers, renormalize = sparse_layers(fields), fields.flag("norm_topk_prob")
    moe = moe_fields(fields, ("num_experts",), renormalize=renormalize, layers=layers, shared=shared)
    config = decoder_config(fields, partial_rotary=True, moe=moe, qk_norm=True, **attention_bias(fields))
    return replace(delta_fields.with_linear_attention(config, fields), unused_weights=("mtp.",))


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.sparse import SparseNames

    names = SparseNames.usual(prefix + "mlp.", "shared_expert.", "shared_expert_gate")
    return delta_fields.block(parts, prefix, layer, names, fused=True)
