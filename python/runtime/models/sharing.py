"""The numbers of ranks that can share a model. Does not import torch."""

from __future__ import annotations

from runtime.errors import ConfigError
from runtime.models.config import ModelConfig


def check_heads(config: ModelConfig, ranks: int) -> None:
    """Raise `ConfigError` if `ranks` ranks cannot share the heads of a layer of the model."""
    for layer in dict.fromkeys(config.of_layer(layer) for layer in range(config.num_layers)):
        check_layer_heads(layer, ranks)


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


def check_experts(config: ModelConfig, ep_size: int) -> None:
    """Raise `ConfigError` if the experts of the model cannot be placed on `ep_size` groups of ranks."""
    if ep_size > 1 and (config.moe is None or config.moe.num_experts % ep_size):
        count = "no experts" if config.moe is None else f"{config.moe.num_experts} experts"
        raise ConfigError(f"--ep-size {ep_size}: {config.architecture} has {count}; use a divisor of their number, or leave the flag out.")
