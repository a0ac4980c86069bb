"""A fingerprint that identifies the model in a folder without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path


def fingerprint(folder: str | None) -> str:
    """A hash of config.json and of the names and sizes of the weights; "" for None."""
    if folder is None:
        return ""
    found = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for file in sorted(Path(folder).glob("*.safetensors")):
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
    return found.hexdigest()[:16]
