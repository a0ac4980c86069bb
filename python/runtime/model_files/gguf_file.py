"""An open GGUF file: its metadata as plain values, its tensors dequantised on demand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar, cast

import gguf
import numpy as np

from runtime.errors import ConfigError

T = TypeVar("T")


class _StrictReader(gguf.GGUFReader):
    """The library's reader, except that reading past the end of the file raises an error instead of returning an empty array."""

    def _get(self, offset, dtype, count=1, override_order=None):  # type: ignore[override]
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("the file ends in the middle of its header")
        return super()._get(offset, dtype, count, override_order)


class GGUFFile:
    """Metadata and tensors of a memory-mapped `.gguf` file.

    Raises:
        ConfigError: the file is missing, truncated, or not a GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not os.path.isfile(path):
            raise ConfigError(f"no such file: {path}")
        try:
            self._reader = _StrictReader(path)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            detail = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise ConfigError(f"{path} is not a complete GGUF file ({detail}); download it again") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self.get("general.architecture", str, "")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the metadata value `key` as `kind` (an int counts as a float). Without a default it is required."""
        field = self._reader.fields.get(key)
        try:
            value: Any = default if field is None else field.contents()
        except ValueError as error:
            raise ConfigError(f"{self.path} holds text that is not UTF-8 in {key}; download it again") from error
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            what = "lacks" if value is None else "has a wrong type for"
            raise ConfigError(f"{self.path} {what} the metadata key {key}; the file cannot be served")
        return cast(T, value)

    def has(self, key: str) -> bool:
        """Whether the metadata holds `key`."""
        return key in self._reader.fields

    @property
    def tensor_names(self) -> list[str]:
        """Names of all tensors, in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as stored, outermost dimension first."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor dequantised to float32, outermost dimension first."""
        stored = self._tensors[name]
        try:
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            kind = stored.tensor_type.name
            raise ConfigError(f"{self.path}: tensors of type {kind} are not supported; use a Q4_0 to Q8_0 or K-quant file") from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.shape(name))
