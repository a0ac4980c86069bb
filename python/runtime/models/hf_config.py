"""Reads a Hugging Face config.json: the fields that families share, with errors that name the file and the field. No
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from runtime.errors import ConfigError, InvalidField
from runtime.models.config import ModelConfig, MoeConfig
from runtime.models.rope_fields import DEFAULT_THETA, read_rope
from runtime.sampling_params import NO_DEFAULTS, SamplingDefaults

MAX_NUMBER = 1e300
"""Above every number that a config.json may sensibly hold."""
MAX_SIZE = 2**31 - 1
"""The largest size or token id."""
MAX_LAYERS = 10_000
DEFAULT_WINDOW = 4096
"""Of families with a sliding window, where the file does not name one (transformers' default)."""


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder, with the `eos_token_id` of generation_config.json before its own where there is one.

    Raises:
        ConfigError: the folder or the file is missing, or is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"--model-path {str(folder)!r} is not a folder; give a Hugging Face folder, a hub id or a .gguf file")
    raw = _read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        generation = _read_json(folder / "generation_config.json")
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
        return SamplingDefaults.of(_read_json(path)) if path.is_file() else NO_DEFAULTS
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


class ConfigFields:
    """The fields of one config.json. Every reader raises `ConfigError` that names the file and the field."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self.where = where

    def get(self, name: str, default: object) -> Any:
        """The value, or `default` where it is absent or null."""
        value = self._raw.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the file has the field, if only as null."""
        return name in self._raw

    def error(self, text: str) -> ConfigError:
        """An error about this file."""
        return ConfigError(f"{self.where}: {text}")

    def flag(self, name: str) -> bool:
        """A boolean; false where absent."""
        return bool(self.get(name, False))

    def positive(self, name: str, default: int | None = None) -> int:
        """A positive integer of at most `MAX_SIZE`."""
        if self.get(name, default) is None:
            raise self.error(f"{name} is missing; it must be a positive integer")
        return self._integer(name, default, 1, "a positive integer")

    def count(self, name: str, default: int) -> int:
        """An integer from 0 to `MAX_SIZE`."""
        return self._integer(name, default, 0, "zero or a positive integer")

    def num_layers(self) -> int:
        """`num_hidden_layers`."""
        layers = self.positive("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise self.error(f"num_hidden_layers is {layers}; at most {MAX_LAYERS} are supported")
        return layers

    def _integer(self, name: str, default: int | None, least: int, kind: str) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(f"{name} is {value!r}; it must be {kind}")
        if value > MAX_SIZE:
            raise self.error(f"{name} is larger than {MAX_SIZE}")
        return value

    def optional_positive(self, name: str) -> int | None:
        """A positive integer, or None where absent."""
        return None if self.get(name, None) is None else self.positive(name)

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        return self._number(name, self.get(name, default))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers; empty where absent."""
        values = self.get(name, [])
        if not isinstance(values, list):
            raise self.error(f"{name} is {values!r}; it must be a list of positive numbers")
        return tuple(self._number(f"{name}[{i}]", value) for i, value in enumerate(values))

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
            raise self.error(f"{name} is {value!r}; it must be a positive number")
        return float(value)

    def mapping(self, name: str) -> ConfigFields:
        """The fields of an object in the file; none where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name} is {value!r}; it must be an object")
        return ConfigFields(value, self.where)

    def filled(self, **defaults: object) -> ConfigFields:
        """These fields, with values for those that are absent or null."""
        return ConfigFields({**self._raw, **{name: self.get(name, value) for name, value in defaults.items()}}, self.where)

    def within(self, name: str) -> ConfigFields:
        """These fields, and those of an object in the file that are not null or absent beside it."""
        inner = self.mapping(name)._raw
        return ConfigFields({**inner, **{key: value for key, value in self._raw.items() if value is not None}}, self.where)

    def under(self, name: str) -> ConfigFields:
        """These fields, with those of an object in the file over them."""
        return ConfigFields({**self._raw, **self.mapping(name)._raw}, self.where)

    def ids(self, name: str) -> list[int]:
        """Token ids from a field that may hold none, one or a list."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MAX_SIZE for i in ids):
            raise self.error(f"{name} is {value!r}; it must be a token id or a list of them")
        return ids

    def architecture(self) -> str:
        """The one class name in `architectures`."""
        names = self.get("architectures", [])
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.error(f"architectures is {names!r}; it must name exactly one model class")
        return names[0]

    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype that the weights were saved in; float32 where none is named."""
        name = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        if name not in ("float32", "bfloat16", "float16"):
            raise self.error(f"dtype is {name!r}; it must be float32, bfloat16 or float16")
        return name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; a model folder needs config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return raw
