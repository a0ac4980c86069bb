"""OLMoE: every MLP is sparse, with a softmax router, and norms of q and k over all heads."""

from __future__ import annotations

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config
from runtime.models.moe_fields import moe_fields

DEFAULTS = {
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "eos_token_id": 50279,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    if fields.given("clip_qkv"):
        raise fields.error(f"clip_qkv is {fields.get('clip_qkv', None)}; clipped queries, keys and values are not supported")
    counts, renormalize = ("num_local_experts", "num_experts"), fields.flag("norm_topk_prob")
    moe = moe_fields(fields, counts, inner="intermediate_size", renormalize=renormalize)
    return decoder_config(fields, **attention_bias(fields), qk_row_norm=True, moe=moe)


block = llama.block
