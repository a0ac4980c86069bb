"""The KV pages of requests: each page is free, in the radix cache, or owned by one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.batch import Int32, no_ints
from runtime.mem_cache.allocator import PageAllocator
from runtime.mem_cache.radix_cache import Node, PartialPage, RadixCache


@dataclass(eq=False, slots=True)
class RequestPages:
    """The pages of one request, in the order of its positions.

    Attributes:
        salt: selects the prefix cache that the request shares.
        count: number of pages.
        shared: number of leading pages that belong to the cache, locked by `node`. The request owns the rest.
        partial: the cached page whose first positions are copied into the first page that the request owns. It stays locked until the copy
            is submitted, so that it is not evicted before.
    """

    salt: str
    count: int = 0
    shared: int = 0
    node: Node | None = None
    partial: PartialPage | None = None
    _buffer: Int32 = field(default_factory=no_ints)

    @property
    def ids(self) -> Int32:
        """Page ids, int32 [count]."""
        return self._buffer[: self.count]

    def extend(self, ids: Int32) -> None:
        """Add pages at the end."""
        end = self.count + len(ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer), 16), dtype=np.int32)
            grown[: self.count] = self.ids
            self._buffer = grown
        self._buffer[self.count : end] = ids
        self.count = end


class KVPageManager:
    """Allocates pages for requests, evicting cached prefixes when none are free, and frees each exactly once.

    Invariant: free pages + cached pages + pages owned by requests = num_pages. `check()` asserts it.
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
        """Pages that can be allocated: free, or cached and not locked."""
        return self.allocator.available + self.cache.evictable_pages

    @property
    def used(self) -> int:
        """Pages that running requests use."""
        return self.num_pages - self.available

    def pages_for(self, slots: int) -> int:
        """Pages needed for `slots` positions."""
        return -(-slots // self.page_size)

    def open(self, ids: Int32, salt: str, reuse: bool = True) -> RequestPages:
        """Start a request: lock the cached prefix of its tokens `ids` int32 [n], unless `reuse` is False.

        The page of `partial` stays locked until `publish` or `close`: after the step that copies it was submitted.
        """
        pages = RequestPages(salt)
        if reuse:
            match = self.cache.match(ids, salt)
            self.cache.lock(match.node)
            pages.extend(match.pages)
            pages.node, pages.shared = match.node, pages.count
            if match.partial is not None:
                self.cache.lock(match.partial.node)
                pages.partial = match.partial
        return pages

    def drop_partial(self, pages: RequestPages) -> None:
        """Unlock the partly reused page, after its copy was submitted or if it is not needed."""
        if pages.partial is not None:
            self.cache.unlock(pages.partial.node)
            pages.partial = None

    def reused_len(self, pages: RequestPages) -> int:
        """Cached positions of a request that was just opened."""
        return pages.shared * self.page_size + (0 if pages.partial is None else pages.partial.count)

    def cached_len(self, ids: Int32, salt: str) -> int:
        """Number of tokens that `open` would find in the cache."""
        return self.cache.cached_len(ids, salt) if self.cache_prefixes else 0

    def grow(self, requests: Sequence[RequestPages], counts: Sequence[int]) -> Int32:
        """Allocate `counts[i]` more pages for request i; the caller has checked `available`.

        Returns:
            The new page ids, int32 [sum(counts)], request after request.
        """
        total = sum(counts)
        short = total - self.allocator.available
        if short > 0:
            self.allocator.free(self.cache.evict(short))
        ids = self.allocator.alloc(total)
        start = 0
        for pages, count in zip(requests, counts, strict=True):
            pages.extend(ids[start : start + count])
            start += count
        self.own_pages += total
        return ids

    def publish(self, pages: RequestPages, ids: Int32, kv_len: int) -> None:
        """Cache the first `kv_len` positions of a running request, unless they are cached from another request."""
        self.drop_partial(pages)
        count = self._whole_pages(ids, kv_len)
        if count <= pages.shared or self.cache.match_len(ids, pages.salt) != pages.shared:
            return
        known, node = self.cache.insert(ids, pages.ids[:count], pages.salt)
        assert known == pages.shared
        self.cache.lock(node)
        self.cache.unlock(pages.node)
        self.own_pages -= count - pages.shared
        pages.node, pages.shared = node, count

    def close(self, pages: RequestPages, ids: Int32, kv_len: int) -> None:
        """End a request: cache its first `kv_len` positions (0: none) and free the rest."""
        self.drop_partial(pages)
        known, kept = pages.shared, pages.shared
        count = self._whole_pages(ids, kv_len)
        if count > pages.shared:
            known, _ = self.cache.insert(ids, pages.ids[:count], pages.salt)
            kept = count
        self.cache.unlock(pages.node)
        self.allocator.free(np.concatenate([pages.ids[pages.shared : known], pages.ids[kept:]]))
        self.own_pages -= pages.count - pages.shared
        pages.count, pages.shared, pages.node = 0, 0, None

    def flush(self) -> int:
        """Free every cached page that no request uses; returns how many."""
        freed = self.cache.evict(self.num_pages)
        self.allocator.free(freed)
        return len(freed)

    def check(self) -> None:
        """Assert the invariant; for tests."""
        self.cache.check()
        assert self.allocator.available + self.cache.total_pages + self.own_pages == self.num_pages

    def _whole_pages(self, ids: Int32, kv_len: int) -> int:
        """Number of pages that may be cached: full of committed KV, and with known lookahead tokens. 0 if prefixes are not cached."""
        return max(0, min(kv_len, len(ids) - self.lookahead)) // self.page_size if self.cache_prefixes else 0
