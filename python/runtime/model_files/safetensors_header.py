"""Reads the header of a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


class Entry(NamedTuple):
    """A tensor: its name, the format's name of its dtype, its shape, and its byte range in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> list[Entry]:
    """The tensors of a file, ordered by offset. Their byte ranges are contiguous up to the end of the file.

    Raises:
        ValueError: the file is not a safetensors file, or its length is not what its header states.
        OSError: it cannot be read.

    Source: the safetensors format: u64 header size, JSON header, data; offsets count from the end of the header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"it has {size} bytes and a header of {header_bytes}")
        header = file.read(header_bytes)
    base = end = 8 + header_bytes
    entries = list[Entry]()
    try:
        stored = json.loads(header)
        stored.pop("__metadata__", None)
        for start, stop, name in sorted((*place["data_offsets"], name) for name, place in stored.items()):
            dtype, shape = stored[name]["dtype"], tuple(stored[name]["shape"])
            counts = all(type(number) is int and number >= 0 for number in (start, stop, *shape))  # a bool is no count
            if not counts or base + start != end or stop < start:
                raise ValueError(f"its header places tensor {name} wrongly")
            end = base + stop
            entries.append(Entry(name, str(dtype), shape, base + start, end))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is malformed: {error!r}") from error
    if end != size:
        raise ValueError(f"it has {size} bytes and its header states {end}")
    return entries


def is_whole_safetensors(path: Path) -> bool:
    """Whether `path` is a safetensors file of exactly the length that its header states."""
    try:
        read_header(path)
    except (OSError, ValueError):
        return False
    return True
