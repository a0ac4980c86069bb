"""Which requests of a ragged pass share a buffer of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def grouped(pages: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Split requests into runs [first, end) whose count times the most pages of one is at most `most`.

    Args:
        pages: of each request, each at most `most`.
    """
    first, widest = 0, 0
    for at, needed in enumerate(pages):
        widest = max(widest, needed)
        if (at + 1 - first) * widest > most:
            yield first, at
            first, widest = at, needed
    yield first, len(pages)
