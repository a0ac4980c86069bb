"""Gemma 4, the text decoder: window layers and global layers with wider heads; some models add experts to the dense MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.errors import ConfigError
from runtime.models.config import FullAttention, ModelConfig, MoeConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config, sliding_windows
from runtime.models.rope_fields import read_rope

if TYPE_CHECKING:  # the front process reads configurations without torch
    from runtime.layers.dense_beside import DenseBesideSparse
    from runtime.layers.mlp import GatedMlp
    from runtime.models.block import SandwichBlock
    from runtime.models.parts import ModelParts

THETA, GLOBAL_THETA = 1e4, 1e6
GLOBAL_HEAD_DIM = 512
OTHER_PARTS = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
"""Beginnings of the names of tensors that text does not need."""
UNSUPPORTED = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
"""Fields of variants that are not served."""


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture of the text decoder, alone or within a model that also sees and hears."""
    multimodal = bool(fields.get("text_config", {}))
    text = fields.within("text_config") if multimodal else fields
    for name in UNSUPPORTED:
        if text.get(name, 0):
            raise text.error(f"{name} is {text.get(name, 0)!r}; this variant of Gemma 4 is not supported")
    if text.get("use_bidirectional_attention", None) == "all":
        raise text.error("use_bidirectional_attention is 'all'; only causal text is supported")
    if text.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise text.error(f"hidden_activation is {text.get('hidden_activation', None)!r}; only 'gelu_pytorch_tanh' is supported")
    bias = text.flag("attention_bias")
    model = decoder_config(text, head_dim=256, qkv_bias=bias, o_bias=bias, qk_norm=True, window=sliding_windows(text, full_layers=0))
    if -1 not in model.window or all(window < 0 for window in model.window):
        raise text.error("layer_types must name both full_attention and sliding_attention")
    rope = read_rope(text, THETA, text.mapping("rope_parameters").mapping("sliding_attention"))
    return replace(
        model,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        full_attention=_full_attention(text, model),
        tie_embeddings=bool(text.get("tie_word_embeddings", True)),
        v_norm=True,
        attn_scale=1.0,
        moe=_experts(text) if text.flag("enable_moe_block") else None,
        embed_scale=model.hidden_size**0.5,
        final_softcap=text.number("final_logit_softcapping", 30.0) if text.get("final_logit_softcapping", None) else 0.0,
        weight_prefix="model.language_model." if multimodal else "model.",
        unused_weights=OTHER_PARTS if multimodal else (),
    )


def _experts(text: ConfigFields) -> MoeConfig:
    count, top_k = text.positive("num_experts"), text.positive("top_k_experts")
    if top_k > count:
        raise text.error(f"top_k_experts is {top_k}; it must be at most num_experts, {count}")
    return MoeConfig(
        num_experts=count,
        top_k=top_k,
        intermediate_size=text.positive("moe_intermediate_size"),
        scoring="softmax",
        renormalize=True,
        layers=(True,) * text.num_layers(),
    )


def _full_attention(text: ConfigFields, model: ModelConfig) -> FullAttention:
    """The heads of the global layers: `per_layer_config` as transformers writes it, or the published fields."""
    own = text.mapping("per_layer_config").mapping(str(model.window.index(-1)))
    shared = text.flag("attention_k_eq_v")
    heads = text.positive("num_global_key_value_heads", model.num_kv_heads) if shared else model.num_kv_heads
    rope = read_rope(text, GLOBAL_THETA, text.mapping("rope_parameters").mapping("full_attention"))
    heads, head_dim = (
        own.positive("num_key_value_heads", heads),
        own.positive("head_dim", text.positive("global_head_dim", GLOBAL_HEAD_DIM)),
    )
    if model.num_q_heads % heads:
        raise text.error(f"num_attention_heads is {model.num_q_heads}; it must be a multiple of num_global_key_value_heads, {heads}")
    return FullAttention(num_kv_heads=heads, head_dim=head_dim, rope_theta=rope.theta, rope_scaling=rope.scaling, shared_kv=shared)


def block(parts: ModelParts, layer: int) -> SandwichBlock:
    """Layer `layer`."""
    from runtime.layers.activation import Activation
    from runtime.models.block import SandwichBlock

    prefix = f"{parts.config.weight_prefix}layers.{layer}."
    attention = parts.of_layer(layer).attention(prefix + "self_attn.", layer)
    dense = parts.gated_mlp(prefix + "mlp.", Activation.GELU_TANH)
    mlp = dense if parts.config.moe is None else _with_experts(parts, prefix, dense)
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    before, behind, mlp_before, mlp_behind = (parts.norm(f"{prefix}{name}_layernorm.weight") for name in names)
    factor = parts.weights.tensor(prefix + "layer_scalar", (1,))
    return SandwichBlock(attention, mlp, before, behind, mlp_before, mlp_behind, factor, parts.context.ops)


def _with_experts(parts: ModelParts, prefix: str, dense: GatedMlp) -> DenseBesideSparse:
    """The dense MLP and the experts beside it."""
    from runtime.layers.activation import Activation
    from runtime.layers.dense_beside import DenseBesideSparse
    from runtime.layers.norm import RMSNorm
    from runtime.models.expert_weights import ExpertNames
    from runtime.models.sparse import SparseNames

    if parts.context.exchange is not None:
        raise ConfigError("--enable-dp-attention: experts beside a dense MLP, as in Gemma 4, are not shared between attention groups.")
    config, tensor = parts.config, parts.weights.tensor
    assert config.moe is not None, "a dense model"
    names = SparseNames(ExpertNames(prefix + "experts."), prefix + "router.proj")
    norms = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    dense_out, sparse_in, sparse_out = (parts.norm(f"{prefix}{name}.weight") for name in norms)
    router_norm = RMSNorm(tensor(prefix + "router.scale", (config.hidden_size,)), config.rms_eps)
    expert_scale = tensor(prefix + "router.per_expert_scale", (config.moe.num_experts,))
    sparse = parts.sparse_mlp(names, Activation.GELU_TANH)
    return DenseBesideSparse(dense, sparse, dense_out, sparse_in, sparse_out, router_norm, expert_scale, parts.context.ops)
