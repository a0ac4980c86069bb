"""ERNIE 4.5 with sparse MLPs: a softmax router with correction bias, shared experts, and rotary embedding on neighbouring entries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.moe_fields import moe_fields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture, without the layer for multi-token prediction that some checkpoints hold."""
    fields.only("use_bias", False)
    moe = moe_fields(
        fields,
        ("num_experts", "moe_num_experts"),
        top_k=fields.named("num_experts_per_tok", "moe_k"),
        correction=True,
        renormalize=True,
        layers=_sparse_layers(fields),
        shared=fields.positive("moe_intermediate_size") * fields.count("moe_num_shared_experts"),
    )
    return replace(decoder_config(fields, rope_interleaved=True, moe=moe), unused_weights=("model.mtp_",))


def _sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`, where -1 is the last layer."""
    count, first, step = fields.num_layers(), fields.count("moe_layer_start_index"), fields.positive("moe_layer_interval")
    last = count - 1 if fields.get("moe_layer_end_index", -1) == -1 else fields.count("moe_layer_end_index")
    return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(count))


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.sparse import SparseNames

    parts.weights.rename(".gate.moe_statics.", ".moe_statics.")  # as in models of transformers 5, whose `save_pretrained` renames them
    correction = prefix + "mlp.moe_statics.e_score_correction_bias"
    return parts.usual_block(prefix, layer, replace(SparseNames.usual(prefix + "mlp."), correction_bias=correction, correction_rows=1))
