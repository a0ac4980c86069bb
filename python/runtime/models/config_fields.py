"""The fields of a config.json, each read as the type that it must have. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from runtime.errors import ConfigError

MAX_NUMBER = 1e300
"""Above every number that a config.json may sensibly hold."""
MAX_SIZE = 2**31 - 1
"""The largest size or token id."""
MAX_LAYERS = 10_000
QUANT_FIELDS = ("quantization_config", "compression_config")
"""Objects in which a config.json describes quantised weights."""
BASE_CLASSES = {f"{name}Model": f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
BASE_CLASSES["Gemma3TextModel"] = "Gemma3ForCausalLM"
"""Classes without an LM head, as embedding models are saved, and those with one."""


class ConfigFields:
    """The fields of one config.json. Every reader raises `ConfigError` that names the file and the field.

    Args:
        defaults: the values of fields that are absent from the file.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, defaults: Mapping[str, object] | None = None) -> None:
        self._raw = raw
        self._defaults = defaults or {}
        self.where = where

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigFields:
        """These fields, with default values for those that are absent from the file."""
        return ConfigFields(self._raw, self.where, defaults)

    def get(self, name: str, default: object) -> Any:
        """The value; if it is absent or null, that of `defaults`, or else `default`."""
        value = self._raw.get(name)
        value = self._defaults.get(name) if value is None else value
        return default if value is None else value

    def given(self, name: str) -> bool:
        """Whether the file has the field with a value other than null."""
        return self._raw.get(name) is not None

    def named(self, *names: str) -> str:
        """Of several names of one field, the one that the file uses; the last one if it uses none."""
        return next((name for name in names if self.given(name)), names[-1])

    def _nullable(self, name: str) -> Any:
        """The value, which may be null; that of `defaults` if it is absent."""
        return self._raw[name] if name in self._raw else self._defaults.get(name)

    def error(self, text: str) -> ConfigError:
        """An error about this file."""
        return ConfigError(f"{self.where}: {text}")

    def flag(self, name: str) -> bool:
        """A boolean; false if it is absent from the file and from `defaults`."""
        return self._boolean(name, self.get(name, False))

    def nullable_flag(self, name: str) -> bool:
        """A boolean whose null means false, whatever `defaults` say."""
        return self._boolean(name, self._nullable(name) or False)

    def _boolean(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}; it must be true or false")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """A positive integer of at most `MAX_SIZE`. Null is refused unless there is a `default`."""
        return self._integer(name, default, 1, "a positive integer")

    def count(self, name: str, default: int | None = None) -> int:
        """An integer from 0 to `MAX_SIZE`. Null is refused unless there is a `default`."""
        return self._integer(name, default, 0, "zero or a positive integer")

    def num_layers(self) -> int:
        """`num_hidden_layers`."""
        layers = self.positive("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise self.error(f"num_hidden_layers is {layers}; at most {MAX_LAYERS} are supported")
        return layers

    def _integer(self, name: str, default: int | None, least: int, kind: str) -> int:
        value = self._nullable(name) if default is None else self.get(name, default)
        if value is None:
            raise self.error(f"{name} is missing; it must be {kind}")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(f"{name} is {value!r}; it must be {kind}")
        if value > MAX_SIZE:
            raise self.error(f"{name} is larger than {MAX_SIZE}")
        return value

    def optional_positive(self, name: str) -> int | None:
        """A positive integer, or None where it is null, or absent from the file and from `defaults`."""
        return None if self._nullable(name) is None else self.positive(name)

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        return self._number(name, self.get(name, default))

    def optional_number(self, name: str) -> float | None:
        """A positive number, or None where it is null, or absent from the file and from `defaults`."""
        value = self._nullable(name)
        return None if value is None else self._number(name, value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers; empty if absent."""
        values = self.get(name, [])
        if not isinstance(values, list):
            raise self.error(f"{name} is {values!r}; it must be a list of positive numbers")
        return tuple(self._number(f"{name}[{i}]", value) for i, value in enumerate(values))

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
            raise self.error(f"{name} is {value!r}; it must be a positive number")
        return float(value)

    def mapping(self, name: str) -> ConfigFields:
        """The fields of an object in the file; none if it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name} is {value!r}; it must be an object")
        return ConfigFields(value, self.where)

    def filled(self, **values: object) -> ConfigFields:
        """These fields, with values for those that are absent or null, before `defaults`."""
        return ConfigFields({**self._raw, **{n: v for n, v in values.items() if not self.given(n)}}, self.where, self._defaults)

    def within(self, name: str, outer: Iterable[str]) -> ConfigFields:
        """The fields of an object in the file, overridden by those of `outer` that the file has outside it and not as null."""
        given = {key: self._raw[key] for key in outer if self.given(key)}
        return ConfigFields({**self.mapping(name)._raw, **given}, self.where, self._defaults)

    def under(self, name: str) -> ConfigFields:
        """These fields, overridden by those of an object in the file."""
        return ConfigFields({**self._raw, **self.mapping(name)._raw}, self.where)

    def ids(self, name: str, kind: str = "a token id") -> list[int]:
        """Numbers from a field that may hold none, one or a list. `kind`: what each of them is, for errors."""
        value = self._nullable(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MAX_SIZE for i in ids):
            raise self.error(f"{name} is {value!r}; it must be {kind} or a list of them")
        return ids

    def only(self, name: str, supported: object) -> None:
        """Raises `ConfigError` if the value is there and is not the one that is supported."""
        if self.get(name, supported) != supported:
            raise self.error(f"{name} is {self.get(name, None)!r}; only {supported!r} is supported")

    def architecture(self) -> str:
        """The one class name in `architectures`; for one of `BASE_CLASSES`, that of the class with an LM head."""
        names = self.get("architectures", [])
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.error(f"architectures is {names!r}; it must name exactly one model class")
        return BASE_CLASSES.get(names[0], names[0])

    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype that the weights were saved in; float32 if none is named."""
        name = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        if name not in ("float32", "bfloat16", "float16"):
            raise self.error(f"dtype is {name!r}; it must be float32, bfloat16 or float16")
        return name
