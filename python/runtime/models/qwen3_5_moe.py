"""Qwen 3.5 with sparse MLPs, the text decoder: a softmax router, and a shared expert with a sigmoid gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models import delta_fields, qwen3_5
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.moe_fields import moe_fields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = delta_fields.DELTA_DEFAULTS | {
    "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "intermediate_size": 512,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture of the text decoder, from a text-only or a multimodal model."""
    text = qwen3_5.text_fields(fields)
    moe = moe_fields(text, ("num_experts",), renormalize=True, shared=text.positive("shared_expert_intermediate_size"))
    return qwen3_5.parse_decoder(fields, text, moe)


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.sparse import SparseNames

    return delta_fields.block(parts, prefix, layer, SparseNames.usual(prefix + "mlp.", "shared_expert.", "shared_expert_gate"))
