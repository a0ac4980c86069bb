"""dots.llm1: DeepSeek-V3's experts, with norms on each head's q and k, and sliding windows in the later layers of some models."""

from __future__ import annotations

from runtime.models import deepseek, llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config, sliding_windows

DEFAULTS = {
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096,
    "first_k_dense_replace": 0, "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture; files may have null for the numbers of groups, and the name of the method as `scoring_func`."""
    if fields.get("scoring_func", "sigmoid") not in ("sigmoid", "noaux_tc"):
        raise fields.error(f"scoring_func is {fields.get('scoring_func', None)!r}; only 'sigmoid' is supported")
    fields, bound = fields.filled(n_group=1, topk_group=1), fields.count("max_window_layers", 62)
    window = sliding_windows(fields, lambda layer: layer >= bound)
    count = deepseek.count_field(fields)
    sparse, shared = deepseek.layers_with_experts(fields), deepseek.shared_size(fields)
    moe = None if count is None else deepseek.grouped_experts(fields, count, sparse, shared)
    return decoder_config(fields, **attention_bias(fields), qk_norm=True, window=window, moe=moe)


block = llama.block
