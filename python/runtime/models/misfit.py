"""Errors about tensors that do not fit their config.json: what differs, which field says so, and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import WeightSlot

CURE = "Use the config.json that was published with these weights, or download them again."
FIELDS: Mapping[str, tuple[str, str]] = {
    "embed_tokens": ("vocab_size", "hidden_size"),
    "lm_head": ("vocab_size", "hidden_size"),
    "q_proj": ("num_attention_heads and head_dim", "hidden_size"),
    "k_proj": ("num_key_value_heads and head_dim", "hidden_size"),
    "v_proj": ("num_key_value_heads and head_dim", "hidden_size"),
    "qkv_proj": ("num_attention_heads, num_key_value_heads and head_dim", "hidden_size"),
    "o_proj": ("hidden_size", "num_attention_heads and head_dim"),
    "gate_proj": ("intermediate_size", "hidden_size"),
    "up_proj": ("intermediate_size", "hidden_size"),
    "gate_up_proj": ("intermediate_size", "hidden_size"),
    "down_proj": ("hidden_size", "intermediate_size"),
    "input_layernorm": ("hidden_size", ""),
    "post_attention_layernorm": ("hidden_size", ""),
}
"""The fields of config.json that give the rows and the columns of a layer's weight."""
QUANTIZED = re.compile(
    r"(\.(qweight|qzeros|scales|weight_packed|weight_scale\w*|weight_scales|weight_blocks|SCB|weight\.(absmax|quant_map\w*|quant_state.*))"
    r"|_proj_(blocks|scales|scale_inv))$"
)
"""Names of tensors that only quantised weights have."""
LAYER = re.compile(r"\.layers\.(\d+)\.")


def wrong_shape(name: str, shape: Sequence[int], asked: Sequence[int]) -> ConfigError:
    """The error for a tensor whose shape is not the model's."""
    return ConfigError(f"tensor {name} has shape {list(shape)}; config.json asks for {list(asked)}{_by_fields(name, shape, asked)}. {CURE}")


def wrong_groups(name: str, shape: tuple[int, ...], slot: WeightSlot) -> ConfigError | None:
    """The error for a tensor that would have the right shape with another `group_size`; None for other tensors."""
    if slot.groups is None:
        return None
    at, columns = slot.groups
    if shape != (*slot.shape[:at], *shape[at : at + 1], *slot.shape[at + 1 :]):
        return None
    return ConfigError(
        f"tensor {name} has shape {list(shape)}; group_size {columns} in quantization_config asks for {list(slot.shape)}. "
        "Correct it, or use another checkpoint."
    )


def wrong_dtype(name: str, found: torch.dtype, asked: torch.dtype | None) -> ConfigError:
    """The error for a tensor whose dtype is not the one that config.json implies; None stands for any floating-point dtype."""
    expected, why = "floating-point numbers" if asked is None else asked, ""
    if asked is None and name.endswith(".weight"):
        why = ", because config.json does not say that this layer is quantized"
    elif asked is not None and asked.itemsize != 2:
        why = ", because of the quantization_config in config.json"
    return ConfigError(f"tensor {name} has dtype {found}; the model expects {expected}{why}. {CURE}")


def cure(missing: Collection[str], unexpected: Collection[str], quantized: bool) -> str:
    """What to do about tensors that a checkpoint lacks or should not have. `quantized`: whether config.json says that weights are."""
    if any(map(QUANTIZED.search, unexpected)) and not quantized:
        return "The weights are quantized, but config.json has no quantization_config. Use the config.json of the quantized checkpoint."
    if any(map(QUANTIZED.search, missing)) and not any(map(QUANTIZED.search, unexpected)) and unexpected:
        return "By its quantization_config these layers are quantized, but their weights are not. " + CURE
    names = missing or unexpected
    layers = [int(found[1]) for name in names if (found := LAYER.search(name))]
    if not (missing and unexpected) and len(layers) == len(names) > 1:
        return f"Its num_hidden_layers may be wrong: all of these tensors are in layers {min(layers)} to {max(layers)}. {CURE}"
    return CURE


def _by_fields(name: str, shape: Sequence[int], asked: Sequence[int]) -> str:
    """The fields of config.json that give the sizes which differ, as part of a sentence; empty if they are not known."""
    parts = name.split(".")
    fields = FIELDS.get(parts[-2] if len(parts) > 1 else "")
    if fields is None or parts[-1] not in ("weight", "bias") or len(shape) != len(asked) or len(asked) > len(fields):
        return ""
    differ = [field for field, own, other in zip(fields, shape, asked, strict=False) if own != other and field]
    if "experts" in parts:
        differ = [field.replace("intermediate_size", "the intermediate size of experts") for field in differ]
    return f", by {' and '.join(differ)}" if differ else ""
