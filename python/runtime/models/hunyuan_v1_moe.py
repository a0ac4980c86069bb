"""Hunyuan A13B: the attention of dense HunYuan, and in every layer a softmax router and one shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models import hunyuan_dense
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.moe_fields import moe_fields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import Block
    from runtime.models.parts import ModelParts

DEFAULTS = {**hunyuan_dense.DEFAULTS, "num_experts": 1, "moe_topk": 1}
TOP_K = "num_experts_per_tok"


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    fields.only("use_qk_norm", True)
    fields.only("use_cla", False)
    counts, shared = ("num_local_experts", "num_experts"), fields.positive("intermediate_size")
    fields = fields.filled(**{TOP_K: _top_k(fields)})
    moe = moe_fields(fields, counts, top_k=TOP_K, inner="intermediate_size", renormalize=True, shared=shared)
    return replace(hunyuan_dense.parse(fields), moe=moe)


def _top_k(fields: ConfigFields) -> int:
    """The number of experts of a token, which published files list for each layer."""
    name = fields.named(TOP_K, "moe_topk")
    counts = set(fields.ids(name, "the number of experts of a token"))
    if len(counts) != 1:
        raise fields.error(f"{name} differs between layers; this is not supported")
    return counts.pop()


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    """Layer `layer`."""
    from runtime.models.sparse import SparseNames

    names = SparseNames.usual(prefix + "mlp.", "shared_mlp.")
    return hunyuan_dense.block(parts, prefix, layer, replace(names, router=prefix + "mlp.gate.wg"))
