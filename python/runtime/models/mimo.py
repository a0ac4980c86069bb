"""MiMo-7B: Qwen 2's layers, and a multi-token prediction layer that reads the hidden state first."""

from __future__ import annotations

import dataclasses

from runtime.models import llama, qwen2
from runtime.models.config import ModelConfig, MtpConfig
from runtime.models.config_fields import ConfigFields

DEFAULTS = qwen2.DEFAULTS
MTP_LAYERS = "model.mtp_layers."
MTP = MtpConfig(
    prefix=MTP_LAYERS + "0.",
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    proj="input_proj",
    final_norm="final_layernorm",
    hidden_first=True,
    blank_start=True,
    feeds_normed=True,
)


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    config = qwen2.parse(fields)
    held = fields.count("num_nextn_predict_layers", 0) > 0
    return dataclasses.replace(config, mtp=MTP if held else None, unused_weights=(MTP_LAYERS,))


block = llama.block
