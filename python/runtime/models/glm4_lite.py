"""GLM-4.7-Flash: DeepSeek's attention and MTP layer, with experts in every layer but the first."""

from __future__ import annotations

from runtime.models import deepseek
from runtime.models.config import ModelConfig
from runtime.models.hf_config import ConfigFields


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    return deepseek.latent_config(fields)


block = deepseek.block
mtp_block = deepseek.mtp_block
