"""Mixtral: every MLP is sparse, and each expert's projections are named w1 (gate), w2 (down) and w3 (up)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows
from runtime.models.moe_fields import moe_fields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts
    from runtime.models.sparse import SparseNames

DEFAULT_THETA = 1e6
"""Base of the rotary embedding where the file names none (transformers' default)."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; without a sliding window unless the file names one."""
    window = sliding_windows(fields, full_layers=0) if fields.get("sliding_window", None) is not None else None
    moe = moe_fields(fields, inner="intermediate_size", renormalize=True)
    return decoder_config(fields, window=window, moe=moe, default_theta=DEFAULT_THETA)


def names(prefix: str) -> SparseNames:
    """The tensors of the sparse MLP of the block `prefix`*."""
    from runtime.models.expert_weights import ExpertNames
    from runtime.models.sparse import SparseNames

    base = prefix + "block_sparse_moe."
    experts = ExpertNames(base + "experts.", gate="w1", up="w3", down="w2")
    return SparseNames(experts, router=base + "gate", correction_bias=base + "e_score_correction_bias")


def block(parts: ModelParts, layer: int) -> Block:
    """Layer `layer`."""
    prefix = f"model.layers.{layer}."
    return parts.sparse_block(prefix, layer, names(prefix))
