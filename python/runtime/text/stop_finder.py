"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopFinder:
    """Passes text on up to the first stop string, and holds back what may become one."""

    stops: tuple[str, ...]
    held: str = ""
    matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what may be shown now. A match sets `matched` and cuts the text there."""
        if not self.stops:
            return text
        text = self.held + text
        hits = [(at + len(stop), -len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if hits:  # the stop string that is complete first, as if letters came one by one; among those the longest
            end, _, self.matched = min(hits)
            self.held = ""
            return text[: end - len(self.matched)]
        keep = max(overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Release the text that was held back; the text has ended without a stop string."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
