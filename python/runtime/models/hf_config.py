"""Reads the fields of a Hugging Face config.json that families share. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, Unpack

from runtime.errors import ConfigError, InvalidField
from runtime.json_file import read_object
from runtime.models.config import ModelConfig, MoeConfig
from runtime.models.config_fields import QUANT_FIELDS, ConfigFields
from runtime.models.rope_fields import RopeFields, read_rope
from runtime.sampling_params import NO_DEFAULTS, SamplingDefaults

DEFAULT_EPS = 1e-6
OUTER_FIELDS = ("architectures", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")
"""The fields of a multimodal model that describe its decoder too; any others are not the decoder's, as in transformers."""
OWN_FILES = {"hf_quant_config": "modelopt", "quantize_config": "gptq", "quant_config": "awq"}
"""Files in which ModelOpt, older AutoGPTQ and older AutoAWQ describe the weights, without `.json`, and the `quant_method` that they leave
out."""
OLD_AWQ = {"w_bit": "bits", "q_group_size": "group_size"}
"""Fields of AutoAWQ's file, and their names in a config.json."""
ACTIVATIONS = ("silu", "swish")
"""The names of the supported activation."""


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The fields of a folder's config.json. The `eos_token_id` of generation_config.json, if any, comes before its own. The contents of
    `OWN_FILES` are added as fields of these names, unless config.json describes the weights itself.

    Raises:
        ConfigError: the folder or the file is missing, or is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"--model-path {str(folder)!r} is not a folder; give a Hugging Face folder, a hub id or a .gguf file")
    raw = read_object(folder / "config.json")
    if not any(raw.get(name) for name in QUANT_FIELDS):
        raw |= _own_files(folder)
    if (folder / "generation_config.json").is_file():
        generation = ConfigFields(read_object(folder / "generation_config.json"), f"{folder}/generation_config.json")
        if generation.given("eos_token_id"):
            own = ConfigFields(raw, str(folder)).within("text_config", ["eos_token_id"])
            raw["eos_token_id"] = [*generation.ids("eos_token_id"), *own.ids("eos_token_id")]
    return raw


def _own_files(folder: Path) -> dict[str, Any]:
    """The contents of those of `OWN_FILES` that the folder has, by name."""
    found = dict[str, Any]()
    for name, method in OWN_FILES.items():
        if (folder / f"{name}.json").is_file():
            own = {OLD_AWQ.get(key, key): value for key, value in read_object(folder / f"{name}.json").items()}
            if method != "awq" or "bits" in own:  # other tools use this name too
                found[name] = {**own, "quant_method": own.get("quant_method") or method}
    return found


def recommended_sampling(folder: str | Path) -> SamplingDefaults:
    """The sampling parameters that a folder's generation_config.json recommends; empty if there is no such file.

    Raises:
        ConfigError: a value is out of bounds.
    """
    path = Path(folder) / "generation_config.json"
    try:
        return SamplingDefaults.of(read_object(path)) if path.is_file() else NO_DEFAULTS
    except InvalidField as error:
        raise ConfigError(f"{path}: {error} Correct the file, or start with --sampling-defaults openai.") from None


class BiasFlags(TypedDict, total=False):
    """Whether projections of attention have biases."""

    qkv_bias: bool
    o_bias: bool


class DecoderFlags(BiasFlags, total=False):
    """Fields of `ModelConfig` that are booleans."""

    mlp_bias: bool
    qk_norm: bool
    qk_row_norm: bool
    sinks: bool
    rope_interleaved: bool


def attention_bias(fields: ConfigFields) -> BiasFlags:
    """Whether all projections of attention have biases: the field `attention_bias`."""
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def decoder_config(
    fields: ConfigFields,
    *,
    head_dim: int | None = None,
    window: tuple[int, ...] | None = None,
    moe: MoeConfig | None = None,
    partial_rotary: bool = False,
    reads_hidden_act: bool = True,
    rope: RopeFields | None = None,
    **flags: Unpack[DecoderFlags],
) -> ModelConfig:
    """The architecture of a decoder under Llama's field names.

    Args:
        head_dim: entries of a head, with latent attention the rotated ones; None for `head_dim` or hidden_size / num_attention_heads.
        window: window of each layer; None for full attention everywhere.
        moe: the sparse MLPs, where the family has them.
        partial_rotary: whether the family reads `partial_rotary_factor`; if not, only factor 1 is accepted.
        reads_hidden_act: whether the activation of the family is `hidden_act`; if so, only silu is accepted.
        rope: the rotary embedding, where that of the file differs between layers.
        flags: boolean fields that are true for the family.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    if reads_hidden_act and fields.get("hidden_act", "silu") not in ACTIVATIONS:
        raise fields.error(f"hidden_act is {fields.get('hidden_act', None)!r}; only 'silu' is supported")
    hidden, num_layers = fields.positive("hidden_size"), fields.num_layers()
    num_heads, num_kv_heads = _heads(fields)
    head_dim = head_dim or fields.positive("head_dim", hidden // num_heads)
    rope, vocab_size = rope or read_rope(fields), fields.positive("vocab_size")
    return ModelConfig(
        architecture=fields.architecture(),
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps", DEFAULT_EPS),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=_rotary_dim(fields, head_dim, rope.partial, partial_rotary),
        max_context_len=rope.max_context_len,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        window=window or (-1,) * num_layers,
        eos_ids=tuple(dict.fromkeys(token for token in fields.ids("eos_token_id") if 0 <= token < vocab_size)),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        dtype=fields.dtype(),
        draft_vocab_size=fields.optional_positive("draft_vocab_size"),
        target_hidden_size=fields.optional_positive("target_hidden_size"),
        moe=moe,
        **flags,
    )


def nullable_head_dim(fields: ConfigFields) -> int:
    """Entries of a head in families whose default for `head_dim` does not replace null: then heads share the hidden size."""
    return fields.optional_positive("head_dim") or fields.positive("hidden_size") // fields.positive("num_attention_heads")


def _heads(fields: ConfigFields) -> tuple[int, int]:
    """Query heads and KV heads."""
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.optional_positive("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads and not fields.given("num_key_value_heads"):
        num_kv_heads = num_heads  # the family's default fits its published sizes only, so the file must mean plain multi-head attention
    if num_heads % num_kv_heads:
        raise fields.error(f"num_attention_heads is {num_heads}; it must be a multiple of num_key_value_heads, {num_kv_heads}")
    return num_heads, num_kv_heads


def _rotary_dim(fields: ConfigFields, head_dim: int, part: float, partial: bool) -> int | None:
    """How many entries of a head are rotated when the share `part` is; None for all. Without `partial`, it must be all."""
    if part != 1.0 and not partial:
        raise fields.error(f"partial_rotary_factor is not 1; {fields.architecture()} rotates whole heads")
    rotated = int(head_dim * part)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise fields.error(f"{rotated} of the {head_dim} entries of a head are rotated; the number must be even and at most head_dim")
    return None if part == 1.0 else rotated


def sliding_windows(fields: ConfigFields, slides: Callable[[int], bool] = lambda layer: True) -> tuple[int, ...] | None:
    """The window of each layer of a family with sliding windows; None where `sliding_window` is null.

    `layer_types` says which layers have one, or else `slides` of the layer's number. The file counts the query's own key too.

    Raises:
        ConfigError: a field is not of its type.
    """
    size, count = fields.optional_positive("sliding_window"), fields.num_layers()
    if size is None:
        return None
    kinds = fields.get("layer_types", ["sliding_attention" if slides(layer) else "full_attention" for layer in range(count)])
    known = isinstance(kinds, list) and len(kinds) == count and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known:
        raise fields.error(f"layer_types must name full_attention or sliding_attention for each of {count} layers")
    return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds)


def required_windows(fields: ConfigFields, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """`sliding_windows` of a family that always has them. Raises `ConfigError` if `sliding_window` is null."""
    window = sliding_windows(fields, slides)
    if window is None:
        raise fields.error("sliding_window is null; it must be a positive integer")
    return window


def unwindowed(window: tuple[int, ...] | None) -> tuple[int, ...]:
    """The layers without a window, in a model that has windows; none in other models."""
    return tuple(layer for layer, size in enumerate(window or ()) if size < 0)


def same_window(fields: ConfigFields) -> tuple[int, ...] | None:
    """The window of each layer of a family that ignores `layer_types`; None if there is no window."""
    size = fields.optional_positive("sliding_window")
    return None if size is None else (size - 1,) * fields.num_layers()
