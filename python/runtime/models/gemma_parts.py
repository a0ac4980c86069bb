"""What the families of Gemma have in common: fields of config.json, and blocks with norms before and after attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config
from runtime.models.rope_fields import RopeFields

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.models.block import SandwichBlock
    from runtime.models.parts import ModelParts

NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
"""The norms before and after attention, then before and after the MLP."""
ACTIVATION = "gelu_pytorch_tanh"
"""The only activation of the MLP."""


def gemma_config(text: ConfigFields, window: tuple[int, ...] | None, rope: RopeFields | None = None) -> ModelConfig:
    """The architecture of Gemma 2 and 3. `window` and `rope`: as for `decoder_config`.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    if text.flag("use_bidirectional_attention"):
        raise text.error("use_bidirectional_attention is true, as in EmbeddingGemma; only causal attention is supported")
    text.only("hidden_activation", ACTIVATION)
    model = decoder_config(text, **attention_bias(text), window=window, reads_hidden_act=False, rope=rope)
    return replace(
        model,
        attn_scale=text.number("query_pre_attn_scalar", model.head_dim) ** -0.5,
        embed_scale=model.hidden_size**0.5,
        final_softcap=softcap(text, "final_logit_softcapping"),
        norm_offset=1.0,
    )


def softcap(text: ConfigFields, name: str) -> float:
    """The soft cap that the field of this name gives; 0 for none."""
    return text.optional_number(name) or 0.0


def block(parts: ModelParts, prefix: str, layer: int) -> SandwichBlock:
    """Layer `layer` of Gemma 2 and 3."""
    from runtime.layers.activation import Activation

    attention = parts.of_layer(layer).attention(prefix + "self_attn.", layer)
    return parts.sandwich_block(prefix, attention, parts.gated_mlp(prefix + "mlp.", Activation.GELU_TANH), NORMS)
