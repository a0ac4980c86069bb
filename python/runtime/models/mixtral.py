"""Mixtral: every MLP is sparse, and each expert's projections are named w1 (gate), w2 (down) and w3 (up)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, same_window
from runtime.models.moe_fields import moe_fields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; without a sliding window unless the file names one."""
    moe = moe_fields(fields, ("num_experts", "num_local_experts"), inner="intermediate_size", renormalize=True)
    return decoder_config(fields, window=same_window(fields), moe=moe)


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.expert_weights import ExpertNames
    from runtime.models.sparse import SparseNames

    base = prefix + "block_sparse_moe."
    parts.weights.rename(".mlp.", ".block_sparse_moe.")  # as in models of transformers 5, whose `save_pretrained` renames them
    experts = ExpertNames(base + "experts.", gate="w1", up="w3", down="w2")
    return parts.usual_block(prefix, layer, SparseNames(experts, base + "gate", base + "e_score_correction_bias"))
