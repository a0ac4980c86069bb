"""EXAONE 4: norms after attention and MLP only, norms on each head's q and k; in models with windows the other layers do not rotate."""

from __future__ import annotations

from dataclasses import replace

from runtime.models import olmo2
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows, unwindowed

DEFAULTS = {
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture. `sliding_window_pattern`, which may be a text, is read only without `layer_types`."""
    known = fields.given("layer_types")
    window = sliding_windows(fields, lambda layer: not known and (layer + 1) % fields.positive("sliding_window_pattern") != 0)
    config = decoder_config(fields, window=window, qk_norm=True)
    return replace(config, unrotated=unwindowed(window))


block = olmo2.block
