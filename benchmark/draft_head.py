"""The draft head of the embedded model that a row of figures was measured with."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.config.speculative import EMBEDDED_DRAFT

EARLIER = "Drafts of the embedded model in this table are those of an earlier draft head."


def label(folder: str | Path = EMBEDDED_DRAFT) -> dict[str, str]:
    """What a row records of the head in `folder`: 12 hexadecimal digits of the SHA-256 of its weights; nothing of random weights."""
    file = Path(folder) / "model.safetensors"
    return {"draft_head": _digits(file, file.stat().st_mtime_ns)} if file.is_file() else {}


@functools.cache
def _digits(file: Path, changed: int) -> str:
    """Those of a file of 22 MB, which pages ask for again for each of their tables; `changed` is when it was written."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def note(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence where a row was measured with another head than the present one; otherwise empty."""
    present = label()["draft_head"]
    return EARLIER if any(row.get("draft_head", present) != present for row in rows) else ""
