"""Lone surrogates in texts that come from JSON escapes."""

from __future__ import annotations

REPLACEMENT = "\ufffd"


def whole_characters(text: str) -> str:
    """`text` with U+FFFD instead of each lone surrogate, which cannot be encoded in UTF-8."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
