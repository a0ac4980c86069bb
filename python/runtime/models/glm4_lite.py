"""GLM-4.7-Flash: DeepSeek's attention and MTP layer, with experts in every layer but the first."""

from __future__ import annotations

from runtime.models import deepseek
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields

DENSE_LAYERS = 1
"""First layers without experts, where the file does not say."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    count, kinds = fields.num_layers(), fields.get("mlp_layer_types", None)
    if kinds is None:
        dense = fields.count("first_k_dense_replace", DENSE_LAYERS)
        return deepseek.latent_config(fields, tuple(layer >= dense for layer in range(count)))
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in ("dense", "sparse") for kind in kinds):
        raise fields.error(f"mlp_layer_types must name dense or sparse for each of {count} layers")
    return deepseek.latent_config(fields, tuple(kind == "sparse" for kind in kinds))


block = deepseek.block
mtp_block = deepseek.mtp_block
