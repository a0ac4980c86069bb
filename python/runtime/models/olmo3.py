"""OLMo 3: OLMo 2's layers, of which three in four have windows; a scaled rotary embedding is that of the others."""

from __future__ import annotations

from runtime.models import olmo2
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config, required_windows
from runtime.models.rope_fields import rope_of_kind, with_full_rope

DEFAULTS = {**olmo2.DEFAULTS, "sliding_window": 4096, "rope_theta": 5e5}


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    window = required_windows(fields, lambda layer: (layer + 1) % 4 != 0)
    theta = fields.number("rope_theta", 5e5)
    local, full = (rope_of_kind(fields, f"{kind}_attention", theta) for kind in ("sliding", "full"))
    config = decoder_config(fields, **attention_bias(fields), qk_row_norm=True, window=window, rope=local)
    return with_full_rope(config, full)


block = olmo2.block
