"""Whether a checkpoint holds an LM head of its own although its config.json says that the embedding is the head."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import ConfigError
from runtime.model_files.checkpoint_folder import safetensors_files
from runtime.model_files.safetensors_header import Entry, read_header

HEAD = "lm_head.weight"
CHUNK_BYTES = 1 << 16
"""Bytes that are read and compared at once; they fit the cache of a core."""


def has_own_head(folder: Path, embedding: str) -> bool:
    """Whether tensor `lm_head.weight` of the checkpoint differs from tensor `embedding`.

    Reads both if both are there. Weights that are absent or damaged count as tied; loading them reports it.
    """
    try:
        places = {entry.name: (file, entry) for file in safetensors_files(folder) for entry in read_header(file)}
    except (ConfigError, OSError, ValueError):
        return False
    return HEAD in places and embedding in places and not _same(places[HEAD], places[embedding])


def _same(first: tuple[Path, Entry], second: tuple[Path, Entry]) -> bool:
    """Whether two tensors have one dtype and shape and the same bytes."""
    (path, one), (other_path, other) = first, second
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(one.start)
        other_file.seek(other.start)
        sizes = [min(CHUNK_BYTES, one.stop - start) for start in range(one.start, one.stop, CHUNK_BYTES)]
        return all(file.read(size) == other_file.read(size) for size in sizes)
