"""SmolLM3: Llama's layers, of which every fourth has no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from runtime.models import llama
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config, sliding_windows

DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "no_rope_layer_interval": 4,
    "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture. Windows are on the layers that `layer_types` names, whatever `use_sliding_window` says, as in transformers' masks.
    Without `layer_types`, they are on the layers without rotary embedding if `use_sliding_window` is true.
    """
    rotated, windows = _rotated(fields), fields.flag("use_sliding_window")
    window = sliding_windows(fields, lambda layer: windows and not rotated[layer])
    config = decoder_config(fields, window=window, **attention_bias(fields), mlp_bias=fields.flag("mlp_bias"))
    return replace(config, unrotated=tuple(layer for layer in range(config.num_layers) if not rotated[layer]))


def _rotated(fields: ConfigFields) -> list[bool]:
    """Whether each layer has a rotary embedding: `no_rope_layers`, in which 1 means that it has, or all but every
    `no_rope_layer_interval`th.
    """
    count = fields.num_layers()
    if not fields.given("no_rope_layers"):
        interval = fields.positive("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(count)]
    given = fields.get("no_rope_layers", None)
    if not isinstance(given, list) or len(given) < count or any(each not in (0, 1) for each in given):
        raise fields.error(f"no_rope_layers must give 0 or 1 for each of {count} layers")
    return [each == 1 for each in given[:count]]


block = llama.block
