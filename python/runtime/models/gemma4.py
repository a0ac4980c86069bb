"""Gemma 4, the text decoder: window layers and global layers with wider heads; some models add experts to the dense MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.errors import ConfigError
from runtime.models.config import FullAttention, ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.gemma_parts import ACTIVATION, NORMS, softcap
from runtime.models.hf_config import OUTER_FIELDS, attention_bias, decoder_config, sliding_windows
from runtime.models.moe_fields import moe_fields
from runtime.models.rope_fields import RopeFields, read_rope

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.layers.dense_sparse_mlp import DenseSparseMlp
    from runtime.layers.mlp import GatedMlp
    from runtime.models.block import SandwichBlock
    from runtime.models.parts import ModelParts

DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "max_position_embeddings": 131072, "sliding_window": 512,
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 256, "bos_token_id": 2, "eos_token_id": 1,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
PERIOD = 6
"""Every sixth layer is global if the file does not give `layer_types`."""
LAYER_FIELDS = {"head_dim", "num_key_value_heads"}
"""The fields that `per_layer_config` may set for global layers."""
OTHER_PARTS = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
"""Prefixes of tensors that text generation does not use."""
UNSUPPORTED = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
"""Fields that only unsupported variants set."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture of the text decoder, from a text-only or a multimodal model."""
    multimodal = bool(fields.get("text_config", {}))
    text = fields.within("text_config", OUTER_FIELDS) if multimodal else fields
    for name in UNSUPPORTED:
        if text.get(name, 0):
            raise text.error(f"{name} is {text.get(name, 0)!r}; this variant of Gemma 4 is not supported")
    if text.get("use_bidirectional_attention", None) == "all":
        raise text.error("use_bidirectional_attention is 'all'; only causal text is supported")
    text.only("hidden_activation", ACTIVATION)
    # That of the layers with windows. Unscaled ones rotate whole heads, whatever the file says, as in transformers.
    rope = replace(_rope(text, "sliding_attention"), partial=1.0, max_context_len=text.positive("max_position_embeddings"))
    model = decoder_config(text, **attention_bias(text), qk_norm=True, window=_windows(text), reads_hidden_act=False, rope=rope)
    sparse = text.flag("enable_moe_block")
    moe = moe_fields(text, ("num_experts",), top_k="top_k_experts", renormalize=True) if sparse else None
    return replace(
        model,
        full_attention=_full_attention(text, model),
        tie_embeddings=fields.flag("tie_word_embeddings"),  # that of `text_config` is not read
        v_norm=True,
        attn_scale=1.0,
        moe=moe,
        embed_scale=model.hidden_size**0.5,
        final_softcap=softcap(text, "final_logit_softcapping"),
        weight_prefix="model.language_model." if multimodal else "model.",
        unused_weights=OTHER_PARTS if multimodal else (),
    )


def _windows(text: ConfigFields) -> tuple[int, ...]:
    """The window of each layer. The last layer is global whatever `layer_types` says, as in transformers."""
    window = sliding_windows(text, lambda layer: (layer + 1) % PERIOD != 0)
    if window is None or max(window[:-1], default=-1) < 0:
        raise text.error("layer_types must name both full_attention and sliding_attention, and sliding_window must be a positive integer")
    return (*window[:-1], -1)


def _rope(text: ConfigFields, kind: str) -> RopeFields:
    """The rotary embedding of the layers of this kind."""
    chosen = text.mapping("rope_parameters").mapping(kind)
    if not chosen.given("rope_theta"):
        raise text.error(f"rope_parameters must hold {kind} with its rope_theta")
    rope = read_rope(text, chosen)
    if rope.scaling is None or rope.scaling.kind != "yarn":
        return rope
    # transformers reads this field beside the kinds of layers, not within one, where it has no effect.
    truncate = text.mapping("rope_parameters").with_defaults({"truncate": True}).nullable_flag("truncate")
    return replace(rope, scaling=replace(rope.scaling, truncate=truncate))


def _full_attention(text: ConfigFields, model: ModelConfig) -> FullAttention:
    """The heads of the global layers: `per_layer_config` as transformers writes it, or the published fields."""
    shared = text.flag("attention_k_eq_v")
    if text.given("per_layer_config"):
        own = _layer_config(text, model)
        heads, head_dim = own.positive("num_key_value_heads", model.num_kv_heads), own.positive("head_dim", model.head_dim)
    else:
        heads = text.positive("num_global_key_value_heads", model.num_kv_heads) if shared else model.num_kv_heads
        head_dim = text.positive("global_head_dim")
    if model.num_q_heads % heads:
        raise text.error(f"num_attention_heads is {model.num_q_heads}; it must be a multiple of num_global_key_value_heads, {heads}")
    rope = _rope(text, "full_attention")
    return FullAttention(num_kv_heads=heads, head_dim=head_dim, rope_theta=rope.theta, rope_scaling=rope.scaling, shared_kv=shared)


def _layer_config(text: ConfigFields, model: ModelConfig) -> ConfigFields:
    """What `per_layer_config` gives every global layer. Raises `ConfigError` if it gives anything else."""
    layers = text.get("per_layer_config", {})
    if layers == {}:  # all layers have the same heads
        return ConfigFields({}, text.where)
    full = {str(layer) for layer, window in enumerate(model.window) if window < 0}
    own = layers.get(str(len(model.window) - 1)) if isinstance(layers, dict) else None
    if not isinstance(own, dict) or set(layers) != full or any(each != own for each in layers.values()) or set(own) - LAYER_FIELDS:
        raise text.error("per_layer_config must give all full_attention layers, and no other, the same head_dim and num_key_value_heads")
    return ConfigFields(own, text.where)


def block(parts: ModelParts, prefix: str, layer: int) -> SandwichBlock:
    """Layer `layer`."""
    from runtime.layers.activation import Activation

    attention = parts.of_layer(layer).attention(prefix + "self_attn.", layer)
    dense = parts.gated_mlp(prefix + "mlp.", Activation.GELU_TANH)
    mlp = dense if parts.config.moe is None else _with_experts(parts, prefix, dense)
    factor = parts.weights.tensor(prefix + "layer_scalar", (1,))
    return parts.sandwich_block(prefix, attention, mlp, NORMS, factor)


def _with_experts(parts: ModelParts, prefix: str, dense: GatedMlp) -> DenseSparseMlp:
    """The dense MLP together with the experts."""
    from runtime.layers.activation import Activation
    from runtime.layers.dense_sparse_mlp import DenseSparseMlp
    from runtime.layers.norm import RMSNorm
    from runtime.models.expert_weights import ExpertNames
    from runtime.models.sparse import SparseNames

    if parts.context.exchange is not None:
        raise ConfigError("--enable-dp-attention: experts added to a dense MLP, as in Gemma 4, are not shared between attention groups.")
    config, tensor = parts.config, parts.weights.tensor
    assert config.moe is not None, "a dense model"
    names = SparseNames(ExpertNames(prefix + "experts."), prefix + "router.proj")
    norms = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    dense_out, sparse_in, sparse_out = (parts.norm(f"{prefix}{name}.weight") for name in norms)
    router_norm = RMSNorm(tensor(prefix + "router.scale", (config.hidden_size,)), config.rms_eps)
    expert_scale = tensor(prefix + "router.per_expert_scale", (config.moe.num_experts,))
    sparse = parts.sparse_mlp(names, Activation.GELU_TANH)
    return DenseSparseMlp(dense, sparse, dense_out, sparse_in, sparse_out, router_norm, expert_scale, parts.context.ops)
