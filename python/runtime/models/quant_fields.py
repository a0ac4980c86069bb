"""Reads how a checkpoint is quantised from its config.json. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from runtime.config.quant_config import BLOCK, Int4Format, QuantConfig
from runtime.models.config_fields import QUANT_FIELDS, ConfigFields

FIELDS = (*QUANT_FIELDS, "hf_quant_config", "quantize_config", "quant_config")
"""Where a checkpoint may describe its weights, in config.json and in files of their own; the first that it has counts."""
DECODER = "model.language_model."
"""What names of the decoder's layers begin with in multimodal models in memory; in some checkpoints they begin otherwise."""
GROUPS = (32, 64, 128)
"""Columns with one scale in int4 weights."""
SUPPORTED = (
    "fp8 (e4m3, one scale for 128 x 128 entries, a row or a tensor), compressed-tensors and modelopt in that format, mxfp4, "
    "and int4 with a scale for 32, 64 or 128 columns: awq (version gemm), gptq, auto-round in the layouts of both and "
    "compressed-tensors (pack-quantized)"
)
AUTO_ROUND: Mapping[str, tuple[Literal["awq", "gptq"], int]] = {
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round": ("gptq", 0),
}
"""The layout of each `packing_format` of AutoRound, and what is added to its stored zero points."""
MODELOPT_ROWS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""ModelOpt algorithms with one weight scale per tensor or per row."""


def read_quantization(fields: ConfigFields) -> QuantConfig | None:
    """How the weights are stored; None if they are not quantised.

    Raises:
        ConfigError: the format is not supported; without this check the weights would be read as unquantised.
    """
    name = next((name for name in FIELDS if fields.get(name, {}) != {}), None)
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
    if method == "awq":
        return _awq(quant, name)
    if method == "gptq":
        return _gptq(quant, name)
    if method == "auto-round":
        return _auto_round(quant, name)
    if method == "modelopt":
        return _modelopt(quant.under("quantization"), name)
    raise _refused(quant, f"{name}.quant_method", method)


def _fp8(quant: ConfigFields, name: str) -> QuantConfig:
    if quant.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(quant, f"{name}.fmt", quant.get("fmt", None))
    if quant.get("expert_dtype", "fp8") != "fp8":
        raise _refused(quant, f"{name}.expert_dtype", quant.get("expert_dtype", None))
    if _names(quant, "modules_to_convert"):
        raise _refused(quant, f"{name}.modules_to_convert", quant.get("modules_to_convert", None))
    kept = (*_names(quant, "modules_to_not_convert"), *_names(quant, "ignored_layers"))
    block = quant.get("weight_block_size", None)
    if block is None:
        return QuantConfig("fp8", "row", "weight_scale", other_scale_name="weight_scale_inv", kept=kept)
    _check_block(quant, name, block)
    return QuantConfig("fp8", "block", "weight_scale_inv", kept=kept)


def _compressed(quant: ConfigFields, name: str) -> QuantConfig | None:
    groups = quant.get("config_groups", {})
    if not groups and quant.get("kv_cache_scheme", None):  # the KV cache alone
        return None
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise quant.error(f"{name}.config_groups must be an object with at least one group")
    sparsity = quant.mapping("sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise _refused(quant, f"{name}.sparsity_config.format", sparsity)
    if quant.get("transform_config", {}):
        raise _refused(quant, f"{name}.transform_config", "rotated weights")
    first, *others = (_compressed_group(quant, name, group, ConfigFields(raw, quant.where)) for group, raw in groups.items())
    if any(replace(other, only=first.only) != first for other in others):
        raise _refused(quant, f"{name}.config_groups", "groups in different formats")
    every = (first, *others)
    return replace(first, only=() if any(not each.only for each in every) else tuple(target for each in every for target in each.only))


def _compressed_group(quant: ConfigFields, name: str, group_name: str, group: ConfigFields) -> QuantConfig:
    """The layers of one group of compressed-tensors, of `config_groups` in the object `name`."""
    field, weights = f"{name}.config_groups.{group_name}", group.mapping("weights")
    kind, strategy = weights.get("type", "unnamed numbers"), weights.get("strategy", "missing")
    bits = _integer(quant, weights, "num_bits", f"{field}.weights") if weights.given("num_bits") else "unknown"
    if (kind, bits) not in (("float", 8), ("int", 4)):
        raise _refused(quant, f"{field}.weights", f"{kind} of {bits} bits")
    storage = group.get("format", quant.get("format", "float-quantized" if kind == "float" else "pack-quantized"))
    if storage not in (("float-quantized", "naive-quantized") if kind == "float" else ("pack-quantized",)):
        raise _refused(quant, f"{name}.format", storage)
    targets, kept = _names(group, "targets"), _names(quant, "ignore")
    only = () if "Linear" in targets else targets
    if kind == "int":
        return QuantConfig("int4", kept=kept, only=only, int4=_packed(quant, group, field))
    if strategy == "block":
        _check_block(quant, name, weights.get("block_structure", None))
        return QuantConfig("fp8", "block", "weight_scale", kept=kept, only=only)
    if strategy not in ("tensor", "channel"):
        raise _refused(quant, f"{field}.weights.strategy", strategy)
    return QuantConfig("fp8", "row", "weight_scale", kept=kept, only=only)


def _packed(quant: ConfigFields, group: ConfigFields, field: str) -> Int4Format:
    """The int4 weights of a group of compressed-tensors layers."""
    weights = group.mapping("weights")
    for activations in ("input_activations", "output_activations"):
        if group.given(activations):
            raise _refused(quant, f"{field}.{activations}", "quantized too")
    strategy = weights.get("strategy", "missing")
    if strategy != "group":
        raise _refused(quant, f"{field}.weights.strategy", strategy)
    order = weights.get("actorder", "static")
    if order not in ("static", "weight", "group"):
        raise _refused(quant, f"{field}.weights.actorder", order)
    columns, symmetric = _group(quant, weights, f"{field}.weights"), weights.filled(symmetric=True).flag("symmetric")
    return Int4Format("compressed-tensors", columns, zeros=not symmetric, ordered=order == "group")


def _awq(quant: ConfigFields, name: str) -> QuantConfig:
    """AutoAWQ's format; a layer is kept if its name contains one of those that are not converted."""
    _check_bits(quant, name)
    field = quant.named("checkpoint_format", "format", "version")
    version = quant.get(field, "gemm")
    if str(version).lower() != "gemm":
        raise _refused(quant, f"{name}.{field}", version)
    return QuantConfig("int4", kept=_with_part(_names(quant, "modules_to_not_convert")), int4=Int4Format("awq", _group(quant, quant, name)))


def _with_part(parts: Iterable[str]) -> tuple[str, ...]:
    """Patterns of the layers whose names contain one of `parts`."""
    return tuple(f"re:.*{re.escape(part)}" for part in parts)


def _gptq(quant: ConfigFields, name: str) -> QuantConfig:
    """GPTQ's format, of AutoGPTQ, GPTQModel and others."""
    _check_bits(quant, name)
    storage = quant.get("checkpoint_format", quant.get("format", "gptq"))
    if storage not in ("gptq", "gptq_v2"):
        raise _refused(quant, f"{name}.checkpoint_format", storage)
    for field in ("is_marlin_format", "lm_head"):
        if quant.get(field, False):
            raise _refused(quant, f"{name}.{field}", quant.get(field, False))
    if quant.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise _refused(quant, f"{name}.pack_dtype", quant.get("pack_dtype", None))
    kept = (*_gptq_kept(quant, name), *_names(quant, "modules_to_not_convert"))
    within = quant.get("modules_in_block_to_quantize", [])
    only = [each for names in within for each in (names if isinstance(names, list) else [names])] if isinstance(within, list) else within
    form = Int4Format(
        "gptq", _group(quant, quant, name),
        zero_offset=int(storage == "gptq"), ordered=quant.flag("desc_act"),
    )  # fmt: skip
    return QuantConfig("int4", kept=kept, only=_checked(quant, f"{name}.modules_in_block_to_quantize", only), int4=form)


def _gptq_kept(quant: ConfigFields, name: str) -> tuple[str, ...]:
    """Patterns of the layers that the rules in GPTQ's `dynamic` exclude. The first rule that matches a layer counts; one that excludes
    nothing may only repeat the fields of all layers, as Qwen's files have it for the LM head.
    """
    rules, patterns, converted = quant.get("dynamic", {}), list[str](), list[str]()
    for rule, changes in rules.items() if isinstance(rules, dict) else [("", rules)]:
        if rule.startswith("-:"):
            patterns.append(f"re:(?!{'|'.join(converted)})(?:{rule[2:]})" if converted else f"re:{rule[2:]}")
        elif isinstance(changes, dict) and all(quant.get(field, None) == value for field, value in changes.items()):
            converted.append(f"(?:{rule.removeprefix('+:')})")
        else:
            raise _refused(quant, f"{name}.dynamic", "rules that do not exclude layers")
    return _checked(quant, f"{name}.dynamic", patterns)


def _auto_round(quant: ConfigFields, name: str) -> QuantConfig:
    """The layouts of AutoAWQ and GPTQ under AutoRound's names. Its rules for single layers may only exclude them."""
    _check_bits(quant, name)
    packing = quant.get("packing_format", "missing")
    if not isinstance(packing, str) or packing not in AUTO_ROUND:
        raise _refused(quant, f"{name}.packing_format", packing)
    for field, usual in (("data_type", ("int",)), ("act_bits", (16, 32)), ("quant_lm_head", (False,))):
        if quant.get(field, usual[0]) not in usual:
            raise _refused(quant, f"{name}.{field}", quant.get(field, None))
    columns, (form, offset) = _group(quant, quant, name), AUTO_ROUND[packing]
    kept = (*_excluded(quant, name, columns), *_with_part(_names(quant, "modules_to_not_convert")))
    return QuantConfig("int4", kept=kept, only=_blocks(quant, name), int4=Int4Format(form, columns, zero_offset=offset))


def _excluded(quant: ConfigFields, name: str, columns: int) -> tuple[str, ...]:
    """The layers that AutoRound's `extra_config` keeps in 16 bits, under whole names or regular expressions.

    Raises:
        ConfigError: a layer has another format than the others, or is one that is never quantised.
    """
    rules, plain, patterns = quant.get("extra_config", {}), list[str](), list[str]()
    if not isinstance(rules, dict) or not all(isinstance(rule, dict) for rule in rules.values()):
        raise quant.error(f"{name}.extra_config must be an object of objects")
    for layer, raw in rules.items():
        rule = ConfigFields(raw, quant.where).filled(bits=4, group_size=columns, data_type="int")
        bits = _integer(quant, rule, "bits", f"{name}.extra_config.{layer}")
        others = (bits, rule.get("group_size", None), rule.get("data_type", None)) != (4, columns, "int")
        if bits < 16 and (others or layer == "lm_head"):
            raise _refused(quant, f"{name}.extra_config", f"a format of its own for {layer}")
        if bits >= 16 and re.fullmatch(r"[\w.-]+", layer):
            plain.append(layer.removeprefix(DECODER))
        elif bits >= 16:
            patterns.append(f"re:.*(?:{layer})")
    return (*plain, *_checked(quant, f"{name}.extra_config", patterns))


def _blocks(quant: ConfigFields, name: str) -> tuple[str, ...]:
    """The blocks that AutoRound has quantized: names in a list, which may be nested, or with commas between them; () for all."""
    field = quant.named("block_name_to_quantize", "to_quant_block_names")
    given = quant.get(field, [])
    lists = given.split(",") if isinstance(given, str) else given
    names = [each for some in lists for each in (some if isinstance(some, list) else [some])] if isinstance(lists, list) else lists
    return tuple(block.removeprefix(DECODER) for block in _checked(quant, f"{name}.{field}", names))


def _check_bits(quant: ConfigFields, name: str) -> None:
    bits = _integer(quant, quant, "bits", name)
    if bits != 4:
        raise _refused(quant, f"{name}.bits", bits)


def _group(quant: ConfigFields, fields: ConfigFields, name: str) -> int:
    """The columns with one scale: `group_size` of `fields`, the object `name`."""
    columns = _integer(quant, fields, "group_size", name)
    if columns not in GROUPS:
        raise _refused(quant, f"{name}.group_size", columns)
    return columns


def _integer(quant: ConfigFields, fields: ConfigFields, key: str, name: str) -> int:
    """The integer `key` of `fields`, the object `name`."""
    value = fields.get(key, None)
    if value is None:
        raise quant.error(f"{name}.{key} is missing; it must be an integer")
    if not isinstance(value, int) or isinstance(value, bool):
        raise quant.error(f"{name}.{key} is {value!r}; it must be an integer")
    return value


def _modelopt(quant: ConfigFields, name: str) -> QuantConfig | None:
    """NVIDIA ModelOpt's format, in config.json, or in hf_quant_config.json, where `quantization` holds all fields but the method."""
    algorithm = quant.get("quant_algo", None)
    if algorithm is None:  # of the KV cache alone
        return None
    if algorithm not in MODELOPT_ROWS:
        raise _refused(quant, f"{name}.quant_algo", algorithm)
    return QuantConfig("fp8", "row", "weight_scale", kept=(*_names(quant, "exclude_modules"), *_names(quant, "ignore")))


def _check_block(quant: ConfigFields, name: str, block: Any) -> None:
    if block != [BLOCK, BLOCK]:
        raise quant.error(f"{name} has blocks of {block!r}; only [{BLOCK}, {BLOCK}] is supported")


def _names(fields: ConfigFields, name: str) -> tuple[str, ...]:
    return _checked(fields, name, fields.get(name, []))


def _checked(fields: ConfigFields, name: str, names: Any) -> tuple[str, ...]:
    """The entries of field `name`, which must be a list of names of layers."""
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise fields.error(f"{name} is {names!r}; it must be a list of names of layers")
    for pattern in (entry[3:] for entry in names if entry.startswith("re:")):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise fields.error(f'{name} holds "re:{pattern[:200]}", which is not a regular expression: {error}') from error
    return tuple(names)


def _refused(quant: ConfigFields, field: str, value: object) -> Exception:
    return quant.error(
        f"the weights are quantized ({field}: {value}), which is not supported; supported are {SUPPORTED}. "
        "Use such a checkpoint, or one with bfloat16, float16 or float32 weights"
    )
