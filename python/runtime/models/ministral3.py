"""Ministral 3, the text decoder: Mistral's layers with YaRN, and queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace

from runtime.models import llama
from runtime.models.config import ModelConfig, QueryScaling
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, same_window
from runtime.models.rope_fields import original_context, rope_object

BETA = "llama_4_scaling_beta"
LARGEST_BETA = 1000
"""Far above published values, which are about 0.1; queries that are scaled by much more overflow."""
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
}  # fmt: skip
DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_parameters": ROPE,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return replace(decoder_config(fields, window=same_window(fields)), query_scaling=_query_scaling(fields))


def _query_scaling(fields: ConfigFields) -> QueryScaling | None:
    rope = rope_object(fields)
    if rope.get(BETA, 0) == 0:
        return None
    beta = rope.number(BETA, 0.0)
    if beta > LARGEST_BETA:
        raise fields.error(f"{BETA} is {beta}; at most {LARGEST_BETA} is supported")
    return QueryScaling(beta, original_context(fields, rope))


block = llama.block
