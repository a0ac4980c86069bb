"""Characters of texts that come from JSON, whose escapes may spell half of a surrogate pair."""

from __future__ import annotations

REPLACEMENT = "\ufffd"


def whole_characters(text: str) -> str:
    """`text` with U+FFFD in place of each half of a surrogate pair, which is no character and has no UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
