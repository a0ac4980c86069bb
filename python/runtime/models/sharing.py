"""The numbers of ranks that can share a model. Does not import torch."""

from __future__ import annotations

import math

from runtime.config.quant_config import scheme_name, shard_unit, with_flag
from runtime.errors import ConfigError
from runtime.models.config import DeltaConfig, ModelConfig

SUMS = 2
"""All-reduces per block: after attention and after the MLP."""


def check_heads(config: ModelConfig, ranks: int) -> None:
    """Raise `ConfigError` if `ranks` ranks cannot share the heads of a layer of the model."""
    for layer in dict.fromkeys(config.of_layer(layer) for layer in range(config.num_layers)):
        check_layer_heads(layer, ranks)
    if config.delta is not None:
        check_delta_heads(config.delta, config.architecture, ranks)


def check_layer_heads(config: ModelConfig, ranks: int) -> None:
    """Raise `ConfigError` if `ranks` ranks cannot share the heads that `config` describes. See `ModelParts.head_shards`."""
    if config.latent is not None:
        if config.num_q_heads % ranks:
            raise ConfigError(
                f"--tp-size {ranks} cannot share the {config.num_q_heads} heads of {config.architecture}. Use a divisor of it."
            )
        return
    if config.num_kv_heads >= ranks:
        return
    if ranks % config.num_kv_heads or (config.num_q_heads // config.num_kv_heads) % (ranks // config.num_kv_heads):
        raise ConfigError(
            f"--tp-size {ranks} cannot share the {config.num_q_heads} query and {config.num_kv_heads} KV heads of {config.architecture}. "
            f"Use at most {config.num_kv_heads}, or a multiple of it that divides {config.num_q_heads}."
        )


def check_delta_heads(delta: DeltaConfig, architecture: str, ranks: int) -> None:
    """Raise `ConfigError` if `ranks` ranks cannot share the heads of linear attention: each has whole key heads with their value heads."""
    if delta.num_key_heads % ranks:
        raise ConfigError(
            f"--tp-size {ranks} cannot share the {delta.num_key_heads} key heads of the linear attention of {architecture}. "
            "Use a divisor of it."
        )


def check_experts(config: ModelConfig, ep_size: int) -> None:
    """Raise `ConfigError` if the experts of the model cannot be placed on `ep_size` groups of ranks."""
    if ep_size > 1 and (config.moe is None or config.moe.num_experts % ep_size):
        count = "no experts" if config.moe is None else f"{config.moe.num_experts} experts"
        raise ConfigError(f"--ep-size {ep_size}: {config.architecture} has {count}; use a divisor of their number, or leave the flag out.")


def check_expert_width(config: ModelConfig, flag: str | None, ranks: int) -> None:
    """Raise `ConfigError` if `ranks` ranks cannot share one expert. `flag`: the value of --quantization."""
    moe, quant = config.moe, with_flag(config.quant, flag)
    if moe is None or not any(moe.layers):
        return
    layer = f"{config.weight_prefix}layers.{moe.layers.index(True)}.mlp.experts.0.gate_proj"
    kept = quant is not None and quant.keeps(layer)
    group = None if quant is None or quant.int4 is None or kept else quant.int4.group
    expert_unit(moe.intermediate_size, ranks, "none" if kept else scheme_name(quant, flag), group)


def expert_unit(inner: int, ranks: int, scheme: str, group: int | None) -> int:
    """The columns at whose multiples ranks cut an expert of intermediate size `inner` that is stored in the scheme of this name.

    Args:
        group: columns with one scale in int4 weights.

    Raises:
        ConfigError: there are more ranks than such units.
    """
    columns, required = shard_unit(scheme, group)
    unit = math.gcd(inner, columns)
    if inner // unit < ranks and not required:
        unit = 1
    if inner // unit < ranks:
        raise ConfigError(
            f"{ranks} ranks cannot share an expert of intermediate size {inner}: the {scheme} weights are cut at multiples "
            f"of {unit}. Use a smaller --tp-size, or a larger --ep-size."
        )
    return unit


def faster_replicated(draft: ModelConfig, ranks: int, sum_bytes: float) -> bool:
    """Whether a decode pass over a dense block of a draft is faster replicated on `ranks` GPUs than sharded.

    Args:
        sum_bytes: bytes that a GPU reads in the time of an all-reduce.
    """
    columns = 2 * (draft.num_q_heads + draft.num_kv_heads) * draft.head_dim + 3 * draft.intermediate_size
    block_bytes = draft.hidden_size * columns * (2 if draft.quant is None else 1)
    return block_bytes * (1 - 1 / ranks) < SUMS * sum_bytes
