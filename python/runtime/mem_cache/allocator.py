"""The free pages of the KV cache."""

from __future__ import annotations

import numpy as np

from runtime.batch import Int32


class PageAllocator:
    """Allocates pages 1..num_pages; page 0 is padding. The time depends on the number of requested pages, not on the pool's size.

    The page freed last is allocated first, so a lightly used server touches little memory.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._top = num_pages
        self._is_free = np.ones(num_pages + 1, dtype=np.bool_)
        self._is_free[0] = False

    @property
    def available(self) -> int:
        """Free pages."""
        return self._top

    def alloc(self, count: int) -> Int32:
        """Allocate `count` pages, int32 [count]; at most `available`."""
        assert 0 <= count <= self._top, f"{count} pages requested, {self._top} are free"
        self._top -= count
        pages = self._stack[self._top : self._top + count][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: Int32) -> None:
        """Free pages, each exactly once."""
        count = len(pages)
        if count == 0:
            return
        assert 1 <= int(pages.min()) <= int(pages.max()) <= self.num_pages, "a page that was never allocated"
        assert not self._is_free[pages].any(), "a page is freed twice"
        assert self._top + count <= self.num_pages, "a page is freed twice in one call"
        self._is_free[pages] = True
        self._stack[self._top : self._top + count] = pages[::-1]
        self._top += count
