"""Identifies the draft head of the embedded model that a row was measured with."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.config.speculative import EMBEDDED_DRAFT

EARLIER = "Drafts of the embedded model in this table are those of an earlier draft head."


def label(folder: str | Path = EMBEDDED_DRAFT) -> dict[str, str]:
    """The label of the head in `folder` for a row: 12 hexadecimal digits of the SHA-256 of its weights; none for random weights."""
    file = Path(folder) / "model.safetensors"
    return {"draft_head": _digits(file, file.stat().st_mtime_ns)} if file.is_file() else {}


@functools.cache
def _digits(file: Path, changed: int) -> str:
    """The digits of a file, cached because each table asks for them and the file has 22 MB. `changed` is its modification time."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def note(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence if a row was measured with another head than the current one; otherwise empty."""
    present = label()["draft_head"]
    return EARLIER if any(row.get("draft_head", present) != present for row in rows) else ""
