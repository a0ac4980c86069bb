"""The KV pages of requests: each page is free, in the radix cache, or owned by one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.batch import Int32, no_ints
from runtime.mem_cache.allocator import PageAllocator
from runtime.mem_cache.radix_cache import Node, PartialPage, RadixCache
from runtime.mem_cache.state_slots import CachedState, StateSlots


@dataclass(eq=False, slots=True)
class RequestPages:
    """The pages of one request, in the order of its positions.

    Attributes:
        salt: selects the prefix cache that the request shares.
        count: number of pages.
        shared: number of leading pages that belong to the cache, locked by `node`. The request owns the rest.
        partial: the cached page whose first positions are copied into the first page that the request owns. It stays locked until the copy
            is submitted, so that it is not evicted before.
        state: the cached recurrent state that the request begins with; None if it begins with none.
        kept: states that its prompt leaves for later requests and that are not cached yet, each with its number of tokens.
    """

    salt: str
    count: int = 0
    shared: int = 0
    node: Node | None = None
    partial: PartialPage | None = None
    state: CachedState | None = None
    kept: list[tuple[int, CachedState]] = field(default_factory=list[tuple[int, CachedState]])
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

    The prefixes of a model with recurrent states are cached only up to a state that a prompt left; behind it they would be of no use.

    Args:
        states: the slots of cached states of such a model; None for other models.
    """

    def __init__(self, num_pages: int, page_size: int, lookahead: int, cache_prefixes: bool, states: StateSlots | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.lookahead = lookahead
        self.cache_prefixes = cache_prefixes
        self.allocator = PageAllocator(num_pages)
        self.states = states
        self.cache = RadixCache(page_size, lookahead, states)
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
            pages.node, pages.shared, pages.state = match.node, pages.count, match.state
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

    def known_len(self, ids: Int32, salt: str) -> int:
        """Number of leading tokens in cached pages, even where no state is cached behind them."""
        return self.cache.match_len(ids, salt) * self.page_size if self.cache_prefixes else 0

    def keep_state(self, pages: RequestPages, length: int) -> CachedState | None:
        """Reserve a slot for the state that a prompt chunk leaves after `length` tokens, a multiple of the page size; None if none is
        free.
        """
        state = None if self.states is None else self.states.reserve()
        if state is not None:
            pages.kept.append((length, state))
        return state

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
        count = self._cacheable_pages(pages, ids, kv_len)
        if count > pages.shared and self.cache.match_len(ids, pages.salt) == pages.shared:
            known, node = self.cache.insert(ids, pages.ids[:count], pages.salt)
            assert known == pages.shared
            self.cache.lock(node)
            self.cache.unlock(pages.node)
            self.own_pages -= count - pages.shared
            pages.node, pages.shared = node, count
        self._attach_states(pages, ids, kv_len)

    def close(self, pages: RequestPages, ids: Int32, kv_len: int) -> None:
        """End a request: cache its first `kv_len` positions (0: none) and free the rest."""
        self.drop_partial(pages)
        known, kept = pages.shared, pages.shared
        count = self._cacheable_pages(pages, ids, kv_len)
        if count > pages.shared:
            known, _ = self.cache.insert(ids, pages.ids[:count], pages.salt)
            kept = count
        self._attach_states(pages, ids, kv_len)
        for _, state in pages.kept:
            assert self.states is not None
            self.states.release(state)
        pages.kept.clear()
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

    def _attach_states(self, pages: RequestPages, ids: Int32, kv_len: int) -> None:
        """Cache those states after at most `kv_len` tokens of a request whose prefixes are cached, by this request or another."""
        if not pages.kept:
            return
        known = min(self.cache.match_len(ids, pages.salt) * self.page_size, kv_len)
        for length, state in pages.kept:
            if length <= known:
                self.cache.attach(ids, length // self.page_size, pages.salt, state)
        pages.kept = [(length, state) for length, state in pages.kept if length > known]

    def _cacheable_pages(self, pages: RequestPages, ids: Int32, kv_len: int) -> int:
        """Number of pages of the first `kv_len` positions that may be cached: full of committed KV, and with known lookahead tokens. With
        recurrent states, only up to the last state that the request left. 0 if prefixes are not cached.
        """
        if not self.cache_prefixes:
            return 0
        if self.states is not None:
            kv_len = max((length for length, _ in pages.kept if length <= kv_len), default=0)
        return max(0, min(kv_len, len(ids) - self.lookahead)) // self.page_size
