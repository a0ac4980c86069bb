"""gpt-oss: attention sinks, windows on every second layer, YaRN, and sparse MLPs of clamped SwiGLU with biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config, sliding_windows
from runtime.models.moe_fields import moe_fields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

ALPHA, LIMIT = 1.702, 7.0
"""Constants of the activation; must equal those in `layers/activation.py`."""
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0, "rope_parameters": YARN, "sliding_window": 128, "attention_bias": True,
    "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    for name, value in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if fields.number(name, value) != value:
            raise fields.error(f"{name} is {fields.get(name, value)}; only {value} is supported")
    counts = ("num_experts", "num_local_experts")
    return decoder_config(
        fields,
        window=sliding_windows(fields, lambda layer: layer % 2 == 0),
        **attention_bias(fields),
        sinks=True,
        reads_hidden_act=False,
        moe=moe_fields(fields, counts, inner="intermediate_size", scoring="topk_softmax", renormalize=True, bias=True),
    )


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.layers.activation import Activation
    from runtime.models.expert_weights import ExpertNames
    from runtime.models.sparse import SparseNames

    names = SparseNames(ExpertNames(prefix + "mlp.experts.", interleaved=True, transposed=True), prefix + "mlp.router")
    attention = parts.attention(prefix + "self_attn.", layer)
    return parts.block(prefix, attention, parts.sparse_mlp(names, Activation.CLAMPED_SWIGLU))
