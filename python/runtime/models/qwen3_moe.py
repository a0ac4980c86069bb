"""Qwen 3 with sparse MLPs: a softmax router without shared experts; some layers may be dense."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config, same_window
from runtime.models.moe_fields import moe_fields, sparse_layers

DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    # Unlike for Qwen 3, transformers reads neither `layer_types` nor `max_window_layers`.
    window = same_window(fields) if fields.flag("use_sliding_window") else None
    counts = ("num_local_experts", "num_experts")  # transformers 5 writes the first, older files have the second
    moe = moe_fields(fields, counts, renormalize=fields.flag("norm_topk_prob"), layers=sparse_layers(fields))
    return decoder_config(fields, **attention_bias(fields), qk_norm=True, window=window, moe=moe)


block = llama.block
