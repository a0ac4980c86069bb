"""HunYuan (dense): Llama's layers, with norms on each head's q and k after the rotary embedding, whose base a fixed `alpha` may raise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config, nullable_head_dim
from runtime.models.rope_fields import DEFAULT_THETA, RopeFields, read_rope, rope_object

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts
    from runtime.models.sparse import SparseNames

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
NORM_NAMES = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
"""The checkpoint's names of the norms of q and k, and the usual ones."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    config = decoder_config(fields, **attention_bias(fields), rope=_rope(fields), qk_norm=True)
    return replace(config, norm_after_rope=True)


def _rope(fields: ConfigFields) -> RopeFields:
    """The rotary embedding. With `alpha`, the kind "dynamic" stands for a base that does not depend on the length of the text."""
    rope = rope_object(fields)
    if rope.get("rope_type", rope.get("type", "default")) != "dynamic" or not rope.get("alpha", None):
        return read_rope(fields)
    dim = nullable_head_dim(fields)
    if dim <= 2:
        raise fields.error(f"heads have {dim} entries; with alpha they must have more than 2")
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA)) * rope.number("alpha", 1.0) ** (dim / (dim - 2))
    return RopeFields(theta, None, 1.0, fields.positive("max_position_embeddings"))


def block(parts: ModelParts, prefix: str, layer: int, names: SparseNames | None = None) -> Block:
    """Layer `layer`, with the sparse MLP of `names` if the model has one."""
    for stored, usual in NORM_NAMES.items():
        parts.weights.rename(stored, usual)
    return parts.usual_block(prefix, layer, names)
