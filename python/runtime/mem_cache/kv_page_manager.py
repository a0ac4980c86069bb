"""Who holds which pages: every page is free, in the prefix cache, or a request's own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtime.batch import Int32, no_ints
from runtime.mem_cache.allocator import PageAllocator
from runtime.mem_cache.radix_cache import Node, RadixCache


@dataclass(eq=False, slots=True)
class Holding:
    """The pages of one request, in the order of its positions.

    Attributes:
        salt: the prefix cache it shares.
        count: pages it can reach.
        shared: how many of them, from the front, belong to the cache and are locked by `node`; the rest are the request's own.
    """

    salt: str
    count: int = 0
    shared: int = 0
    node: Node | None = None
    _buffer: Int32 = field(default_factory=no_ints)

    @property
    def pages(self) -> Int32:
        """int32 [count]."""
        return self._buffer[: self.count]

    def extend(self, pages: Int32) -> None:
        """Add pages at the end."""
        end = self.count + len(pages)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer), 16), dtype=np.int32)
            grown[: self.count] = self.pages
            self._buffer = grown
        self._buffer[self.count : end] = pages
        self.count = end


class PageLedger:
    """Takes pages for requests, from the free ones or by eviction, and gets them back once.

    Invariant: pages free + pages in the cache + pages of requests' own = num_pages.
    """

    def __init__(self, num_pages: int, page_size: int, lookahead: int, cache_prefixes: bool) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.lookahead = lookahead
        self.cache_prefixes = cache_prefixes
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(page_size, lookahead)
        self.own_pages = 0

    @property
    def available(self) -> int:
        """Pages that `grow` can find: free, or cached and unlocked."""
        return self.allocator.available + self.cache.evictable_pages

    @property
    def used(self) -> int:
        """Pages that running requests need."""
        return self.num_pages - self.available

    def pages_for(self, slots: int) -> int:
        """Pages that hold `slots` positions."""
        return -(-slots // self.page_size)

    def open(self, ids: Int32, salt: str, reuse: bool = True) -> Holding:
        """Begin a request with the cached prefix of its tokens `ids` int32 [n], locked; none if `reuse` is False."""
        holding = Holding(salt)
        if self.cache_prefixes and reuse:
            match = self.cache.match(ids, salt)
            self.cache.lock(match.node)
            holding.extend(match.pages)
            holding.node, holding.shared = match.node, holding.count
        return holding

    def cached_len(self, ids: Int32, salt: str) -> int:
        """Tokens that `open` would find."""
        return self.cache.match_len(ids, salt) * self.page_size if self.cache_prefixes else 0

    def grow(self, holding: Holding, count: int) -> Int32:
        """Give `holding` pages until it has `count`; returns the new ones. The caller made sure of `available`."""
        missing = max(0, count - holding.count)
        if missing == 0:
            return no_ints()
        short = missing - self.allocator.available
        if short > 0:
            self.allocator.free(self.cache.evict(short))
        pages = self.allocator.alloc(missing)
        holding.extend(pages)
        self.own_pages += missing
        return pages

    def publish(self, holding: Holding, ids: Int32, kv_len: int) -> None:
        """Let others use the first `kv_len` positions of a request that goes on, unless the cache has them from another already."""
        if not self.cache_prefixes:
            return
        count = self._whole_pages(ids, kv_len)
        if count <= holding.shared or self.cache.match_len(ids, holding.salt) != holding.shared:
            return
        known, node = self.cache.insert(ids, holding.pages[:count], holding.salt)
        assert known == holding.shared
        self.cache.lock(node)
        self.cache.unlock(holding.node)
        self.own_pages -= count - holding.shared
        holding.node, holding.shared = node, count

    def close(self, holding: Holding, ids: Int32, kv_len: int) -> None:
        """End a request. Its first `kv_len` positions stay in the cache (0: none do), all else is free."""
        known, kept = holding.shared, holding.shared
        count = self._whole_pages(ids, kv_len)
        if self.cache_prefixes and count > holding.shared:
            known, _ = self.cache.insert(ids, holding.pages[:count], holding.salt)
            kept = count
        self.cache.unlock(holding.node)
        self.allocator.free(np.concatenate([holding.pages[holding.shared : known], holding.pages[kept:]]))
        self.own_pages -= holding.count - holding.shared
        holding.count, holding.shared, holding.node = 0, 0, None

    def flush(self) -> None:
        """Forget every cached prefix that no request uses."""
        self.allocator.free(self.cache.evict(self.num_pages))

    def check(self) -> None:
        """Assert the invariant; for tests."""
        self.cache.check()
        assert self.allocator.available + self.cache.total_pages + self.own_pages == self.num_pages

    def _whole_pages(self, ids: Int32, kv_len: int) -> int:
        """Pages that may be cached: full, with KV, and with the token after them known."""
        return max(0, min(kv_len, len(ids) - self.lookahead)) // self.page_size
