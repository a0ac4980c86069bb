"""Seed-OSS: Llama's layers with biases on q, k and v, and heads of 128."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, nullable_head_dim

DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; `attention_bias` covers q, k and v, `attention_out_bias` the output projection. As in transformers, heads are of
    128 unless `head_dim` is null.
    """
    qkv, out = fields.flag("attention_bias"), fields.flag("attention_out_bias")
    return decoder_config(fields, head_dim=nullable_head_dim(fields), qkv_bias=qkv, o_bias=out, mlp_bias=fields.flag("mlp_bias"))


block = llama.block
