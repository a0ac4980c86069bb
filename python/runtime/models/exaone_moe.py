"""K-EXAONE: DeepSeek-V3's experts, norms on each head's q and k, and rotary embedding only in layers with a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models import deepseek
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows, unwindowed
from runtime.models.moe_fields import named_layers

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
    "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "bos_token_id": 1, "eos_token_id": 53,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture, without the layer for multi-token prediction that checkpoints hold."""
    step = 1 if fields.given("layer_types") else fields.positive("sliding_window_pattern")
    window = sliding_windows(fields, lambda layer: (layer + 1) % step != 0)
    shared = fields.positive("moe_intermediate_size") * fields.count("num_shared_experts")
    sparse = named_layers(fields) or deepseek.layers_with_experts(fields)
    moe = deepseek.grouped_experts(fields, "num_experts", sparse, shared)
    return replace(decoder_config(fields, qk_norm=True, window=window, moe=moe), unrotated=unwindowed(window), unused_weights=("mtp.",))


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.sparse import SparseNames

    parts.weights.rename(".gate.e_score_correction_bias", ".e_score_correction_bias")  # as in models of transformers 5, renamed when saved
    names = SparseNames.usual(prefix + "mlp.")
    return parts.usual_block(prefix, layer, replace(names, correction_bias=prefix + "mlp.e_score_correction_bias"))
