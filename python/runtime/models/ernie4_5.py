"""ERNIE 4.5 (dense): Llama's layers, with neighbouring entries of a head rotated together, and heads of 128."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, nullable_head_dim

DEFAULTS = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; `use_bias` covers all projections. As in transformers, heads are of 128 unless `head_dim` is null."""
    bias = fields.flag("use_bias")
    head_dim = nullable_head_dim(fields)
    return decoder_config(fields, head_dim=head_dim, qkv_bias=bias, o_bias=bias, mlp_bias=bias, rope_interleaved=True)


block = llama.block
