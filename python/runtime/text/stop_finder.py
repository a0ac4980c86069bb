"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopFinder:
    """Passes text on up to the first stop string, or with `keep` to its end, and holds back text that may be the start of one."""

    stops: tuple[str, ...]
    keep: bool = False
    held: str = ""
    matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return the text that can be shown now. A match sets `matched` and cuts the text there."""
        if not self.stops:
            return text
        text = self.held + text
        hits = [(at + len(stop), -len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if hits:  # the stop string that ends first, as if characters arrived one by one; of several, the longest
            end, _, self.matched = min(hits)
            self.held = ""
            return text[: end if self.keep else end - len(self.matched)]
        shown = len(text) - max(overlap(text, stop) for stop in self.stops)
        self.held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back, because the text ended without a stop string."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str, start: int = 0) -> int:
    """Length of the longest suffix of `text[start:]` that is a proper prefix of `stop`."""
    at = text.find(stop[:1], max(start, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[:1], at + 1)
    return len(text) - at if at >= 0 else 0
