"""Writes a safetensors file tensor by tensor, so that only one tensor is in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

Dtype = Literal["F32", "BF16"]
_BYTES = {"F32": 4, "BF16": 2}


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: Dtype, tensors: Iterable[np.ndarray]) -> None:
    """Write `tensors` (float32, in the order of `shapes`) as `dtype`.

    Source: the safetensors format: u64 header size, JSON header, data; offsets count from the end of the header.
    """
    with path.open("wb") as out:
        out.write(file_start((name, dtype, shape, _BYTES[dtype]) for name, shape in shapes.items()))
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tensor.shape == shape, f"{name}: {tensor.shape} is not {shape}"
            values = tensor.astype("<f4", copy=False) if dtype == "F32" else to_bfloat16(tensor)
            out.write(np.ascontiguousarray(values).data.cast("B"))


def file_start(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The header of a file with these tensors: (name, the format's name of the dtype, shape, bytes per number)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, width in tensors:
        end = offset + math.prod(shape) * width
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data for memory mapping
    return len(text).to_bytes(8, "little") + text


def to_bfloat16(tensor: np.ndarray) -> np.ndarray:
    """Round finite float32 to the nearest bfloat16, ties to even; returns its bits as uint16."""
    bits = tensor.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
