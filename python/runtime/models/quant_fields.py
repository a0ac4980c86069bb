"""Reads how a checkpoint is quantised from its config.json. No torch."""

from __future__ import annotations

import re
from typing import Any

from runtime.config.quant_config import BLOCK, QuantConfig
from runtime.models.config_fields import ConfigFields

FIELDS = ("quantization_config", "compression_config")
SUPPORTED = "fp8 (e4m3, one scale for 128 x 128 entries, a row or a tensor), compressed-tensors in that format, and mxfp4"


def read_quantization(fields: ConfigFields) -> QuantConfig | None:
    """How the weights are stored; None for plain numbers.

    Raises:
        ConfigError: in a way that is not supported; they would load as plain numbers.
    """
    name = next((name for name in FIELDS if fields.get(name, {})), None)
    if name is None:
        return None
    quant = fields.mapping(name)
    method = quant.get("quant_method", "an unnamed scheme")
    if method == "mxfp4":
        return QuantConfig("mxfp4", kept=("self_attn", *_names(quant, "modules_to_not_convert")))
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(quant, name)
    if method == "compressed-tensors":
        return _compressed(quant, name)
    raise _refused(quant, name, str(method))


def _fp8(quant: ConfigFields, name: str) -> QuantConfig:
    if quant.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(quant, name, f"fp8 in {quant.get('fmt', None)}")
    kept = (*_names(quant, "modules_to_not_convert"), *_names(quant, "ignored_layers"))
    block = quant.get("weight_block_size", None)
    if block is None:
        return QuantConfig("fp8", "row", "weight_scale", kept=kept)
    _check_block(quant, name, block)
    return QuantConfig("fp8", "block", "weight_scale_inv", kept=kept)


def _compressed(quant: ConfigFields, name: str) -> QuantConfig:
    groups = quant.get("config_groups", {})
    if not isinstance(groups, dict) or len(groups) != 1 or not all(isinstance(group, dict) for group in groups.values()):
        raise quant.error(f"{name}.config_groups must be an object with one group")
    (raw,) = groups.values()
    group = ConfigFields(raw, f"{quant.where}: {name}")
    weights = group.mapping("weights")
    kind, bits, strategy = (weights.get(field, None) for field in ("type", "num_bits", "strategy"))
    storage = group.get("format", quant.get("format", "float-quantized"))
    if (kind, bits) != ("float", 8) or storage not in ("float-quantized", "naive-quantized"):
        raise _refused(quant, name, f"compressed-tensors, {storage} with {kind} weights of {bits} bits")
    targets, kept = _names(group, "targets"), _names(quant, "ignore")
    only = () if "Linear" in targets else targets
    if strategy == "block":
        _check_block(quant, name, weights.get("block_structure", None))
        return QuantConfig("fp8", "block", "weight_scale", kept=kept, only=only)
    if strategy not in ("tensor", "channel"):
        raise _refused(quant, name, f"compressed-tensors with one scale for each {strategy}")
    return QuantConfig("fp8", "row", "weight_scale", kept=kept, only=only)


def _check_block(quant: ConfigFields, name: str, block: Any) -> None:
    if block != [BLOCK, BLOCK]:
        raise quant.error(f"{name} has blocks of {block!r}; only [{BLOCK}, {BLOCK}] is supported")


def _names(fields: ConfigFields, name: str) -> tuple[str, ...]:
    names = fields.get(name, [])
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise fields.error(f"{name} is {names!r}; it must be a list of names of layers")
    for pattern in (entry[3:] for entry in names if entry.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.error(f'{name} holds "re:{pattern}", which is not a regular expression: {error}') from error
    return tuple(names)


def _refused(quant: ConfigFields, name: str, method: str) -> Exception:
    return quant.error(
        f"the weights are quantized ({name}: {method}), which is not supported; supported are {SUPPORTED}. "
        "Use such a checkpoint, or one with bfloat16, float16 or float32 weights"
    )
