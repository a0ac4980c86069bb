"""Detects a checkpoint with its own LM head although config.json says that head and embedding are tied."""

from __future__ import annotations

from pathlib import Path

from runtime.model_files.checkpoint_folder import tensor_places
from runtime.model_files.safetensors_header import Entry

HEAD = "lm_head.weight"
CHUNK_BYTES = 1 << 16
"""Bytes that are read and compared at a time; they fit into a core's cache."""


def has_own_head(folder: Path, embedding: str, head: str) -> bool:
    """Whether tensor `head` of the checkpoint differs from tensor `embedding`.

    Reads both tensors if both exist. Missing or damaged weights count as tied.
    """
    places = tensor_places(folder)
    return head in places and embedding in places and not _same(places[head], places[embedding])


def _same(first: tuple[Path, Entry], second: tuple[Path, Entry]) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    (path, one), (other_path, other) = first, second
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(one.start)
        other_file.seek(other.start)
        sizes = [min(CHUNK_BYTES, one.stop - start) for start in range(one.start, one.stop, CHUNK_BYTES)]
        return all(file.read(size) == other_file.read(size) for size in sizes)
