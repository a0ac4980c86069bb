"""GLM-4 of April 2025 (GLM-4-0414, GLM-Z1): the projections of `GlmForCausalLM`, with norms before and after attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models import glm

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import SandwichBlock
    from runtime.models.parts import ModelParts

DEFAULTS = glm.DEFAULTS
NORMS = ("input", "post_self_attn", "post_attention", "post_mlp")
"""The norms before and after attention, then before and after the MLP."""

parse = glm.parse


def block(parts: ModelParts, prefix: str, layer: int) -> SandwichBlock:
    """Layer `layer`."""
    attention, mlp = parts.attention(prefix + "self_attn.", layer), parts.gated_mlp(prefix + "mlp.", fused=True)
    return parts.sandwich_block(prefix, attention, mlp, NORMS)
