"""Reads a Hugging Face config.json: the fields that families share. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, Unpack

from runtime.errors import ConfigError, InvalidField
from runtime.json_file import read_object
from runtime.models.config import ModelConfig, MoeConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.rope_fields import DEFAULT_THETA, read_rope
from runtime.sampling_params import NO_DEFAULTS, SamplingDefaults

DEFAULT_WINDOW = 4096
"""Of families with a sliding window, where the file does not name one (transformers' default)."""


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder, with the `eos_token_id` of generation_config.json before its own where there is one, and
    ModelOpt's hf_quant_config.json as a field of that name.

    Raises:
        ConfigError: the folder or the file is missing, or is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"--model-path {str(folder)!r} is not a folder; give a Hugging Face folder, a hub id or a .gguf file")
    raw = read_object(folder / "config.json")
    if (folder / "hf_quant_config.json").is_file():
        raw["hf_quant_config"] = {"quant_method": "modelopt", **read_object(folder / "hf_quant_config.json")}
    if (folder / "generation_config.json").is_file():
        generation = read_object(folder / "generation_config.json")
        both = (ConfigFields(generation, f"{folder}/generation_config.json"), ConfigFields(raw, str(folder)))
        raw["eos_token_id"] = [token for fields in both for token in fields.ids("eos_token_id")]
    return raw


def recommended_sampling(folder: str | Path) -> SamplingDefaults:
    """How generation_config.json of a folder recommends to sample the model; nothing where there is no such file.

    Raises:
        ConfigError: a value is out of bounds.
    """
    path = Path(folder) / "generation_config.json"
    try:
        return SamplingDefaults.of(read_object(path)) if path.is_file() else NO_DEFAULTS
    except InvalidField as error:
        raise ConfigError(f"{path}: {error} Correct the file, or start with --sampling-defaults openai.") from None


class DecoderFlags(TypedDict, total=False):
    """Fields of `ModelConfig` that are booleans."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    qk_row_norm: bool
    sinks: bool
    rope_interleaved: bool


def decoder_config(
    fields: ConfigFields,
    *,
    head_dim: int | None = None,
    window: tuple[int, ...] | None = None,
    moe: MoeConfig | None = None,
    default_theta: float = DEFAULT_THETA,
    partial_rotary: bool = False,
    **flags: Unpack[DecoderFlags],
) -> ModelConfig:
    """The architecture of a decoder under Llama's field names.

    Args:
        head_dim: the family's default; None for hidden_size / num_attention_heads.
        window: of each layer; None for full attention everywhere.
        moe: the sparse MLPs, where the family has them.
        default_theta: base of the rotary embedding where the file names none.
        partial_rotary: whether the family reads `partial_rotary_factor`; otherwise a part is refused.
        flags: where the family has them.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.error(f"hidden_act is {fields.get('hidden_act', None)!r}; only 'silu' is supported")
    hidden, num_heads, num_layers = fields.positive("hidden_size"), fields.positive("num_attention_heads"), fields.num_layers()
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"num_attention_heads is {num_heads}; it must be a multiple of num_key_value_heads, {num_kv_heads}")
    head_dim = fields.positive("head_dim", head_dim or hidden // num_heads)
    rope = read_rope(fields, default_theta)
    if rope.partial != 1.0 and not partial_rotary:
        raise fields.error(f"partial_rotary_factor is not 1; {fields.architecture()} rotates whole heads")
    return ModelConfig(
        architecture=fields.architecture(),
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=None if rope.partial == 1.0 else int(head_dim * rope.partial),
        max_context_len=rope.max_context_len,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        window=window or (-1,) * num_layers,
        eos_ids=tuple(dict.fromkeys(fields.ids("eos_token_id"))),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        dtype=fields.dtype(),
        draft_vocab_size=fields.optional_positive("draft_vocab_size"),
        target_hidden_size=fields.optional_positive("target_hidden_size"),
        moe=moe,
        quant=None,  # the registry reads it, for every family
        **flags,
    )


def sliding_windows(fields: ConfigFields, full_layers: int, period: int = 1, default_size: int = DEFAULT_WINDOW) -> tuple[int, ...] | None:
    """The window of each layer of a family with sliding windows; None where `sliding_window` is null.

    `layer_types` says which layers have one, or else every `period`-th does behind the first `full_layers`. The file
    counts the query's own key too.

    Raises:
        ConfigError: a field is not of its type.
    """
    size = fields.positive("sliding_window") if fields.get("sliding_window", None) is not None else None
    if size is None and fields.has("sliding_window"):
        return None
    num_layers = fields.num_layers()
    slides = [i >= full_layers and (i - full_layers) % period == 0 for i in range(num_layers)]
    default = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
    kinds = fields.get("layer_types", default)
    known = isinstance(kinds, list) and len(kinds) == num_layers and all(k in ("full_attention", "sliding_attention") for k in kinds)
    if not known:
        raise fields.error(f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
    return tuple((size or default_size) - 1 if kind == "sliding_attention" else -1 for kind in kinds)
