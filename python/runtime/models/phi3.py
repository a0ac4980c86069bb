"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with fused projections, longrope, and a sliding window on every layer of some models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, same_window

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.checkpoint_parts import Sliceable
    from runtime.models.parts import ModelParts
    from runtime.models.weights import NamedTensors

DEFAULTS = {
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    config = decoder_config(fields, window=same_window(fields), partial_rotary=True)
    if config.rope_scaling is not None and config.rope_scaling.kind != "longrope":
        raise fields.error(f"rope scaling {config.rope_scaling.kind!r} is not supported; Phi-3 has only 'longrope'")
    return config


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    c = parts.config
    q_rows, kv_rows = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    _accept_fused(parts, prefix + "self_attn.", "qkv_proj", {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows})
    _accept_fused(parts, prefix + "mlp.", "gate_up_proj", dict.fromkeys(("gate_proj", "up_proj"), c.intermediate_size))
    return parts.usual_block(prefix, layer)


def _accept_fused(parts: ModelParts, prefix: str, fused: str, rows: Mapping[str, int]) -> None:
    """Accept the weight `fused` in place of those that it concatenates; `rows`: of each of them."""
    from runtime.models.weights import FusedTensor

    def split(tensor: Sliceable) -> NamedTensors:
        start = 0
        for name, count in rows.items():
            yield f"{prefix}{name}.weight", tensor[start : start + count]
            start += count

    shape = (sum(rows.values()), parts.config.hidden_size)
    parts.weights.also(f"{prefix}{fused}.weight", FusedTensor([shape], split))
