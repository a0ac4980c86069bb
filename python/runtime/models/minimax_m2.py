"""MiniMax M2: a sigmoid router with correction bias, norms of q and k over all heads, rotary embedding on part of each head."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from runtime.models import mixtral
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.moe_fields import moe_fields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULT_THETA, HEAD_DIM = 5e6, 128
"""Where the file names none (transformers' defaults)."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; published files name the rotated part of a head `rotary_dim`."""
    for name, only in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer"), ("use_qk_norm", True)):
        if fields.get(name, only) != only:
            raise fields.error(f"{name} is {fields.get(name, only)!r}; only {only!r} is supported")
    moe = moe_fields(fields, inner="intermediate_size", scoring="sigmoid", renormalize=True)
    config = decoder_config(
        fields, head_dim=HEAD_DIM, moe=moe, default_theta=DEFAULT_THETA, partial_rotary=True, qk_row_norm=True
    )  # fmt: skip
    rotated = fields.optional_positive("rotary_dim")
    if rotated is None or config.rotary_dim is not None or rotated == config.head_dim:
        return config
    if rotated > config.head_dim or rotated % 2:
        raise fields.error(f"rotary_dim is {rotated}; it must be even and at most head_dim, {config.head_dim}")
    return dataclasses.replace(config, rotary_dim=rotated)


def block(parts: ModelParts, layer: int) -> Block:
    """Layer `layer`, whose sparse MLP has Mixtral's names."""
    prefix = f"model.layers.{layer}."
    return parts.sparse_block(prefix, layer, mixtral.names(prefix))
