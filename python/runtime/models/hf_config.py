"""The architecture of a model as a Hugging Face config.json tells it. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.errors import ConfigError
from runtime.models.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from Llama, where its config.json does not say so itself.

    Attributes:
        qkv_bias, o_bias: whether those projections have biases; None where `attention_bias` says it.
        qk_norm: whether q and k are normed per head.
        head_dim: the default where the file names none; None for hidden_size / heads.
        window_switch: the field that must be true for `sliding_window` to count; None where it always counts, "" where it never does.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    window_switch: str | None = ""


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, window_switch=None),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, window_switch="use_sliding_window"),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128, window_switch="use_sliding_window"),
}

MOST = 1e300
"""Above every number that a config.json may sensibly hold."""
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The rescalings of rotary embeddings that are supported, and the numbers each of them needs."""


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
        both = (_Fields(generation, f"{folder}/generation_config.json"), _Fields(raw, str(folder)))
        raw["eos_token_id"] = [token for fields in both for token in fields.ids("eos_token_id")]
    return raw


def load_hf_config(folder: str | Path) -> ModelConfig:
    """The architecture of the model in `folder`.

    Raises:
        ConfigError: no readable config.json, an unsupported architecture, or a value that this engine cannot follow.
    """
    return parse_hf_config(read_hf_config(folder), str(folder))


def parse_hf_config(raw: Mapping[str, Any], where: str, family: Family | None = None) -> ModelConfig:
    """The architecture that the fields of a config.json describe.

    Args:
        raw: the file's fields.
        where: what errors call the file.
        family: for architectures outside `FAMILIES`, such as draft heads: what they take after.
    """
    fields = _Fields(raw, where)
    architecture = fields.architecture()
    family = family or FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(f"{where}: architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}")
    fields.refuse_quantization()
    if fields.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    hidden, num_heads, num_layers = (fields.positive(n) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{where}: num_attention_heads is {num_heads}; it must be a multiple of num_key_value_heads, {num_kv_heads}")
    attention_bias = bool(fields.get("attention_bias", False))
    theta, scaling = fields.rope()
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.positive("head_dim", family.head_dim or hidden // num_heads),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_context_len=fields.positive("max_position_embeddings", 2048),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        window=fields.windows(family, num_layers),
        eos_ids=tuple(dict.fromkeys(fields.ids("eos_token_id"))),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        dtype=fields.dtype(),
        draft_vocab_size=fields.optional_positive("draft_vocab_size"),
        target_hidden_size=fields.optional_positive("target_hidden_size"),
    )


class _Fields:
    """The fields of one config.json, read with errors that name the file and the field."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def get(self, name: str, default: object) -> Any:
        """The value, or `default` where it is absent or null."""
        value = self._raw.get(name)
        return default if value is None else value

    def positive(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._where}: {name} is {value!r}; it must be a positive integer")
        return value

    def optional_positive(self, name: str) -> int | None:
        """A positive integer, or None where absent."""
        return None if self.get(name, None) is None else self.positive(name)

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MOST:
            raise ConfigError(f"{self._where}: {name} is {value!r}; it must be a positive number")
        return float(value)

    def mapping(self, name: str) -> _Fields:
        """The fields of an object in the file; none where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self._where}: {name} is {value!r}; it must be an object")
        return _Fields(value, self._where)

    def ids(self, name: str) -> list[int]:
        """Token ids from a field that may hold none, one or a list."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"{self._where}: {name} is {value!r}; it must be a token id or a list of them")
        return ids

    def architecture(self) -> str:
        """The one class name in `architectures`."""
        names = self.get("architectures", [])
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(f"{self._where}: architectures is {names!r}; it must name exactly one model class")
        return names[0]

    def refuse_quantization(self) -> None:
        """Raise ConfigError for weights stored in a quantisation scheme: they would load as plain numbers."""
        for name in ("quantization_config", "compression_config"):
            scheme = self.mapping(name)
            if self.get(name, {}):
                method = scheme.get("quant_method", "an unnamed scheme")
                raise ConfigError(
                    f"{self._where}: the weights are quantized ({name}: {method}), which is not supported; "
                    "use a checkpoint with bfloat16, float16 or float32 weights"
                )

    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype that the weights were saved in; float32 where none is named."""
        name = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        if name not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"{self._where}: dtype is {name!r}; it must be float32, bfloat16 or float16")
        return name

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Base and rescaling of the rotary embedding, in the older form of the file or the newer (`rope_parameters`)."""
        newer = self.mapping("rope_parameters")
        scaling = newer if self.get("rope_parameters", {}) else self.mapping("rope_scaling")
        theta = newer.number("rope_theta", self.number("rope_theta", 10000.0))
        if scaling.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0)) != 1.0:
            raise ConfigError(f"{self._where}: partial_rotary_factor is not 1; only whole-head rotary embeddings are supported")
        return theta, scaling.rope_scaling()

    def rope_scaling(self) -> RopeScaling | None:
        """These fields as the rescaling of a rotary embedding."""
        kind = str(self.get("rope_type", self.get("type", "default")))
        if kind == "default":
            return None
        if kind not in ROPE_SCALINGS:
            raise ConfigError(
                f"{self._where}: rope scaling {kind!r} is not supported; supported are default, {' and '.join(ROPE_SCALINGS)}"
            )
        missing = [name for name in ROPE_SCALINGS[kind] if self.get(name, None) is None]
        if missing:
            raise ConfigError(f"{self._where}: the {kind} rope scaling lacks {missing[0]!r}")
        numbers = [self.number(name, 1.0) for name in ROPE_SCALINGS[kind]]
        if kind == "linear":
            return RopeScaling("linear", numbers[0])
        return RopeScaling("llama3", numbers[0], numbers[1], numbers[2], int(numbers[3]))

    def windows(self, family: Family, num_layers: int) -> tuple[int, ...]:
        """Keys that a query sees before itself, by layer. The file counts the query's own key too."""
        size = self._sliding_window(family)
        if size is None:
            return (-1,) * num_layers
        kinds = self.get("layer_types", None)
        if kinds is None:
            # Without a list, Qwen's first `max_window_layers` layers see everything; Mistral's none do.
            full = int(self.get("max_window_layers", 0)) if family.window_switch else 0
            kinds = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != num_layers:
            raise ConfigError(f"{self._where}: layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
        return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds)

    def _sliding_window(self, family: Family) -> int | None:
        if family.window_switch == "" or (family.window_switch and not self.get(family.window_switch, False)):
            return None
        return self.optional_positive("sliding_window")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; a model folder needs config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return raw
