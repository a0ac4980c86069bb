"""The attention of each layer of a dense decoder."""

from __future__ import annotations

import torch

from runtime.layers.attention.base import AttentionSpec
from runtime.mem_cache.kv_spec import KVSpec
from runtime.models.config import ModelConfig


def attention_specs(config: ModelConfig, dtype: torch.dtype) -> tuple[AttentionSpec, ...]:
    """One spec per layer, with KV in `dtype`."""
    kv = KVSpec("gqa", config.num_kv_heads, config.head_dim, config.head_dim, dtype)
    return tuple(AttentionSpec(i, config.num_q_heads, kv, config.head_dim**-0.5, window) for i, window in enumerate(config.window))
