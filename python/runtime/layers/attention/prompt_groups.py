"""Groups the requests of a ragged pass so that each group fits a buffer of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def grouped(pages: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Split requests into runs [first, end) so that the number of requests times the largest number of pages is at most `most`.

    Args:
        pages: pages of each request, each at most `most`.
    """
    first, widest = 0, 0
    for at, needed in enumerate(pages):
        widest = max(widest, needed)
        if (at + 1 - first) * widest > most:
            yield first, at
            first, widest = at, needed
    yield first, len(pages)
