"""Reads the rotary embedding that a config.json describes, as transformers does. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from runtime.models.config import FullAttention, ModelConfig, RopeScaling
from runtime.models.config_fields import MAX_SIZE, ConfigFields

DEFAULT_THETA = 10000.0
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
"""The supported kinds of rotary embeddings, and the fields that each requires."""
ALIASES = {"su": "longrope"}
"""Older names of kinds."""


@dataclass(frozen=True, slots=True)
class RopeFields:
    """The rotary embedding of a model, or of some of its layers.

    Attributes:
        theta: base of the wavelengths.
        scaling: None for unscaled frequencies.
        partial: the share of a head that is rotated.
        max_context_len: the longest context that the model supports.
    """

    theta: float
    scaling: RopeScaling | None
    partial: float
    max_context_len: int


def read_rope(fields: ConfigFields, chosen: ConfigFields | None = None) -> RopeFields:
    """The rotary embedding of a config.json.

    Args:
        chosen: the object that holds the parameters, where layers differ; None for `rope_scaling`, which wins as in
            transformers, or `rope_parameters`.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    chosen = rope_object(fields) if chosen is None else chosen
    theta = chosen.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    # Null at the top level means whole heads, as in transformers, whatever the family's default is.
    partial = chosen.number("partial_rotary_factor", fields.optional_number("partial_rotary_factor") or 1.0)
    context = fields.positive("max_position_embeddings")
    name = str(chosen.get("rope_type", chosen.get("type", "default")))
    kind = ALIASES.get(name, name)
    if kind not in REQUIRED:
        raise fields.error(f"rope scaling {kind!r} is not supported; supported are {', '.join(REQUIRED)}")
    if missing := [field for field in REQUIRED[kind] if chosen.get(field, None) is None]:
        raise fields.error(f"the {kind} rope scaling lacks {missing[0]!r}")
    if kind == "default":
        return RopeFields(theta, None, partial, context)
    original = original_context(fields, chosen)
    if kind == "llama3":
        bounds = low, high = chosen.number("low_freq_factor", 1.0), chosen.number("high_freq_factor", 1.0)
        if high <= low:
            raise fields.error(f"high_freq_factor is {high}; it must be larger than low_freq_factor, {low}")
        return RopeFields(theta, RopeScaling("llama3", chosen.number("factor", 1.0), *bounds, original), partial, context)
    if kind == "yarn":
        if theta <= 1.0:
            raise fields.error(f"rope_theta is {theta}; for yarn it must be larger than 1")
        scaling = _yarn(chosen, original, context)
        return RopeFields(theta, scaling, partial, _extended(fields, original, scaling.factor))
    if kind == "longrope":
        return RopeFields(theta, _longrope(chosen, original, context), partial, context)
    factor = chosen.number("factor", 1.0)
    if kind == "dynamic":
        scaling = RopeScaling("dynamic", factor, original_max_position=context)
        return RopeFields(theta, scaling, partial, _extended(fields, original, factor))
    if kind == "proportional":
        return RopeFields(theta, RopeScaling("proportional", factor, rotated=partial), 1.0, context)
    return RopeFields(theta, RopeScaling("linear", factor), partial, _extended(fields, original, factor))


def rope_of_kind(fields: ConfigFields, kind: str, theta: float) -> RopeFields:
    """The rotary embedding of the layers of one kind, in whole heads: a part of `rope_parameters`. An older `rope_scaling` is that of the
    layers with full attention. The context is `max_position_embeddings` even if the embedding is scaled.

    Args:
        kind: "full_attention" or "sliding_attention".
        theta: base of the wavelengths if the part does not give it.

    Raises:
        ConfigError: as for `read_rope`, or the parts are missing.
    """
    both = fields.mapping("rope_parameters")
    if fields.get("rope_parameters", {}) and not (both.given("full_attention") or both.given("sliding_attention")):
        raise fields.error("rope_parameters must hold full_attention or sliding_attention")
    part = both.mapping(kind)
    scaled = kind == "full_attention" and fields.get("rope_scaling", {})
    chosen = (fields.mapping("rope_scaling") if scaled else part).filled(rope_theta=part.number("rope_theta", theta))
    return replace(read_rope(fields, chosen), max_context_len=fields.positive("max_position_embeddings"))


def with_full_rope(config: ModelConfig, rope: RopeFields) -> ModelConfig:
    """`config`, with this rotary embedding in the layers with full attention, if it differs from that of the others."""
    if (rope.theta, rope.scaling) == (config.rope_theta, config.rope_scaling):
        return config
    full = FullAttention(
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, rope_theta=rope.theta, rope_scaling=rope.scaling, shared_kv=False
    )
    return replace(config, full_attention=full)


def rope_object(fields: ConfigFields) -> ConfigFields:
    """The object with the parameters of all layers."""
    name = "rope_scaling" if fields.get("rope_scaling", {}) else "rope_parameters"
    chosen = fields.mapping(name)
    if chosen.given("full_attention") or chosen.given("sliding_attention"):
        raise fields.error(f"{name} differs between layers; only for Gemma 4, Gemma 3 and OLMo 3 is this supported")
    return chosen


def original_context(fields: ConfigFields, chosen: ConfigFields) -> int:
    """The context length before scaling. As in transformers, the top-level field wins over the one in the object `chosen`."""
    name = "original_max_position_embeddings"
    return fields.optional_positive(name) or chosen.positive(name, fields.positive("max_position_embeddings"))


def _extended(fields: ConfigFields, original: int, factor: float) -> int:
    """The context length that a scaling gives: model cards tell users to add it, and to leave max_position_embeddings as it is."""
    if original * factor > MAX_SIZE:
        raise fields.error(f"factor is {factor} for a context of {original} tokens; their product is larger than {MAX_SIZE}")
    return max(fields.positive("max_position_embeddings"), int(original * factor))


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of attention for contexts that are `factor` times longer.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.4; `weight` as in DeepSeek-V2.
    """
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(chosen: ConfigFields, original: int, context: int) -> RopeScaling:
    factor = chosen.number("factor", context / original)
    weight, all_dim = (0.0 if chosen.get(name, 0) == 0 else chosen.number(name, 1.0) for name in ("mscale", "mscale_all_dim"))
    magnitude = mscale(factor, weight) / mscale(factor, all_dim) if weight and all_dim else mscale(factor)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=chosen.number("beta_fast", 32.0),
        beta_slow=chosen.number("beta_slow", 1.0),
        truncate=chosen.with_defaults({"truncate": True}).nullable_flag("truncate"),
        magnitude=chosen.number("attention_factor", magnitude),
        mscale_all_dim=all_dim,
    )


def _longrope(chosen: ConfigFields, original: int, context: int) -> RopeScaling:
    factor = chosen.number("factor", context / original)
    if original == 1:
        raise chosen.error("original_max_position_embeddings is 1; for longrope it must be larger")
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        factor,
        original_max_position=original,
        short_factors=chosen.numbers("short_factor"),
        long_factors=chosen.numbers("long_factor"),
        magnitude=chosen.number("attention_factor", magnitude),
    )
