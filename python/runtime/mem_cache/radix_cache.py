"""The radix cache: a tree of token prefixes whose KV is cached, with LRU eviction of prefixes that no request uses."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from runtime.batch import Int32, no_ints
from runtime.mem_cache.state_slots import CachedState, StateSlots

MIN_COPIED = 8
"""Minimum number of matching positions for which a page is copied. Prompts that share fewer have little in common except the begin-of-text
token and the start of a chat template, and would all copy those."""


class Children:
    """The edges below a node, by the bytes of their first page's key; the keys are also kept sorted.

    The key with the longest common prefix with given bytes is adjacent to these bytes in this order.
    """

    __slots__ = ("_keys", "_nodes")

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        """The edge with this key."""
        return self._nodes.get(key)

    def put(self, key: bytes, node: Node) -> None:
        """Add an edge, or replace the one with this key."""
        if key not in self._nodes:
            insort(self._keys, key)
        self._nodes[key] = node

    def remove(self, key: bytes) -> None:
        """Remove the edge with this key."""
        del self._nodes[key]
        del self._keys[bisect_left(self._keys, key)]

    def neighbours(self, start: bytes) -> list[Node]:
        """The edges before and after `start`, which may be shorter than a key."""
        at = bisect_left(self._keys, start)
        return [self._nodes[key] for key in self._keys[max(at - 1, 0) : at + 1]]


@dataclass(eq=False, slots=True)
class Node:
    """An edge of the tree and the subtree below it.

    Attributes:
        tokens: int32 [pages * page_size + lookahead]: the edge's tokens, and the `lookahead` tokens after them.
        pages: int32 [pages]; empty only in a root.
        locks: number of requests that use this node or one below it.
        state: the recurrent state after the edge's last token; None if none was cached.
    """

    parent: Node | None
    tokens: Int32
    pages: Int32
    salt: str
    children: Children = field(default_factory=Children)
    locks: int = 0
    last_use: int = 0
    in_heap: bool = False
    state: CachedState | None = None

    @property
    def has_state(self) -> bool:
        """Whether a request can begin after this edge with a cached state."""
        return self.state is not None and self.state.alive


@dataclass(frozen=True, slots=True)
class PartialPage:
    """The first positions of a cached page, to be copied.

    Attributes:
        node: an edge with only this page.
        count: number of positions, less than the page size.
    """

    node: Node
    count: int

    @property
    def page(self) -> int:
        """The page's number."""
        return int(self.node.pages[0])


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix.

    Attributes:
        pages: int32 [n].
        node: the node at which they end; None if n is 0.
        partial: the reusable positions of one more page; None if there is none.
        state: the recurrent state at its end; None for a model without, or if `pages` is empty.
    """

    pages: Int32
    node: Node | None
    partial: PartialPage | None
    state: CachedState | None = None


class RadixCache:
    """Maps token prefixes to pages. The cache owns the pages in it; the caller frees the pages that it returns.

    The unit is a page. The key of a page is its `page_size` tokens and the `lookahead` tokens that follow: with EAGLE, the draft's KV at a
    position depends on the next token, so a prompt can reuse a prefix of n tokens only if n + 1 tokens match. Pages without a branch
    between them form one edge, compared as one array.
    After the last page that matches completely, the page with the longest match can be reused in part, by a copy.

    With recurrent states, a prompt can reuse a prefix only up to an edge's end at which a state is cached.

    Args:
        states: the cached states of a model with recurrent states; None for other models.
    """

    def __init__(self, page_size: int, lookahead: int, states: StateSlots | None = None) -> None:
        self.page_size, self.states = page_size, states
        self.lookahead = lookahead
        self.total_pages = 0
        self.evictable_pages = 0
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # every evictable leaf, with the time of its last use or an earlier one
        self._clock = 0

    # ---- reading

    def match_len(self, ids: Int32, salt: str) -> int:
        """Number of whole pages of the longest cached prefix of `ids` int32 [n] that leaves a token to compute, with or without a state at
        its end. Does not mark it as used.
        """
        return whole_pages(self._walk(self._reusable(ids), salt))

    def cached_len(self, ids: Int32, salt: str) -> int:
        """Number of positions that a request with these tokens can reuse, including those of a partly reused page. Does not mark them as
        used.
        """
        ids = self._reusable(ids)
        path = self._to_state(self._walk(ids, salt))
        return whole_pages(path) * self.page_size + self._partial(path, ids, salt)[1]

    def match(self, ids: Int32, salt: str) -> Match:
        """The longest reusable prefix of `ids` int32 [n] that leaves a token to compute; marks it as used now."""
        ids = self._reusable(ids)
        path = self._to_state(self._walk(ids, salt))
        edge, count = self._partial(path, ids, salt)
        node = self._use(path)
        if self.states is not None and node is not None and node.state is not None:
            self.states.use(node.state)
        pages = [each.pages for each, _ in path[:-1]] + ([] if node is None else [node.pages])
        partial = None
        if edge is not None:
            first = self._cut(edge, 1)  # so that the page can be locked separately
            first.last_use = self._clock
            partial = PartialPage(first, count)
        return Match(np.concatenate(pages) if pages else no_ints(), node, partial, None if node is None else node.state)

    # ---- writing

    def insert(self, ids: Int32, pages: Int32, salt: str) -> tuple[int, Node | None]:
        """Add the prefix stored in `pages` int32 [n]; `ids` has at least n * page_size + lookahead tokens.

        Returns:
            The number of leading pages that were cached already, and the node at which the prefix ends (None if n is 0). The caller keeps
            these leading pages; the cache owns the rest from now on.
        """
        if len(pages) == 0:
            return 0, None
        end = len(pages) * self.page_size + self.lookahead
        assert len(ids) >= end, "a page may be inserted only when the token after it is known"
        path = self._walk(ids[:end], salt)
        known = whole_pages(path)
        node = self._use(path) or self._root(salt)
        if known == len(pages):
            return known, node
        leaf = Node(node, ids[known * self.page_size : end].copy(), pages[known:].copy(), salt)
        leaf.last_use = self._clock
        node.children.put(self._key(leaf.tokens), leaf)
        self.total_pages += len(leaf.pages)
        self.evictable_pages += len(leaf.pages)
        self._offer(leaf)
        return known, leaf

    def attach(self, ids: Int32, count: int, salt: str, state: CachedState) -> None:
        """Cache the recurrent state after the first `count` pages of `ids`, which are cached; if there is one already, it is kept."""
        assert self.states is not None, "the model has recurrent states"
        path = self._walk(ids[: count * self.page_size + self.lookahead], salt)
        assert whole_pages(path) == count > 0, "a state is cached behind cached pages"
        node = self._cut(*path[-1])
        if node.has_state:
            self.states.release(state)
        else:
            node.state = state
            self.states.attach(state)

    def lock(self, node: Node | None) -> None:
        """Protect `node` and its ancestors from eviction until `unlock` has been called as often as `lock`."""
        while node is not None and node.parent is not None:
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        """Undo one `lock`."""
        while node is not None and node.parent is not None:
            assert node.locks > 0, "a node is unlocked twice"
            node.locks -= 1
            if node.locks == 0:
                self.evictable_pages += len(node.pages)
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> Int32:
        """Remove up to `count` unlocked pages, least recently used leaves first, and return them for the caller to free."""
        freed: list[Int32] = []
        while count > 0 and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.locks or node.children or node.parent is None:
                continue
            if stamp != node.last_use:
                self._offer(node)
                continue
            taken = self._trim(node, count)
            freed.append(taken)
            count -= len(taken)
        return np.concatenate(freed) if freed else no_ints()

    # ---- checking

    def check(self) -> None:
        """Assert the invariants by a walk over the whole tree; for tests."""
        total = evictable = states = 0
        stack = list(self._roots.values())
        assert all(root.children for root in stack), "an empty root is left over"
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            total += len(node.pages)
            evictable += len(node.pages) if node.locks == 0 else 0
            if node.parent is not None:
                assert 0 < len(node.pages) * self.page_size == len(node.tokens) - self.lookahead
                assert node.parent.children.get(self._key(node.tokens)) is node
                assert node.parent.parent is None or node.parent.locks >= node.locks
                assert node.in_heap or node.locks or node.children, "an evictable leaf that eviction cannot find"
            states += node.has_state
        assert (total, evictable) == (self.total_pages, self.evictable_pages)
        if self.states is not None:
            self.states.check()
            assert states == self.states.used

    # ---- internal

    def _reusable(self, ids: Int32) -> Int32:
        return ids[: max(0, len(ids) - 1 + self.lookahead)]

    def _key(self, tokens: Int32) -> bytes:
        return tokens[: self.page_size + self.lookahead].tobytes()

    def _root(self, salt: str) -> Node:
        return self._roots.setdefault(salt, Node(None, no_ints(), no_ints(), salt))

    def _walk(self, ids: Int32, salt: str) -> list[tuple[Node, int]]:
        """The edges from the root that match `ids`, each with its number of matching pages: all, except on the last edge."""
        path: list[tuple[Node, int]] = []
        node, at, width = self._roots.get(salt), 0, self.page_size + self.lookahead
        while node is not None and len(ids) - at >= width:
            node = node.children.get(ids[at : at + width].tobytes())
            if node is None:
                break
            count = (common_prefix_len(node.tokens, ids[at:]) - self.lookahead) // self.page_size
            path.append((node, count))
            if count < len(node.pages):
                break
            at += count * self.page_size
        return path

    def _to_state(self, path: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        """A walked path up to the last edge with a state at its end; with a model without states, all of it."""
        if self.states is None:
            return path
        ends = [i for i, (edge, count) in enumerate(path, 1) if count == len(edge.pages) and edge.has_state]
        return path[: ends[-1]] if ends else []

    def _partial(self, path: list[tuple[Node, int]], ids: Int32, salt: str) -> tuple[Node | None, int]:
        """The edge and the number of reusable positions of one page after a walked path; (None, 0) if they are too few.

        The page is the next one on the path's last edge, or the first page of an edge below.
        """
        if self.states is not None:  # a state inside a page is not cached
            return None, 0
        behind = ids[whole_pages(path) * self.page_size :][: self.page_size + self.lookahead]
        if min(self.page_size - 1, len(behind) - self.lookahead) < MIN_COPIED:
            return None, 0
        end, skipped = path[-1] if path else (self._roots.get(salt), 0)
        if end is None:
            return None, 0
        edges, start = ([end], skipped * self.page_size) if skipped < len(end.pages) else (end.children.neighbours(behind.tobytes()), 0)
        found = [(common_prefix_len(edge.tokens[start:], behind) - self.lookahead, edge) for edge in edges]
        count, edge = max(found, key=lambda each: each[0], default=(0, None))
        return (edge, count) if count >= MIN_COPIED else (None, 0)

    def _cut(self, node: Node, count: int) -> Node:
        """Split `node` after its first `count` pages if it has more; returns the node with these pages."""
        if count == len(node.pages):
            return node
        size, parent = self.page_size, node.parent
        assert parent is not None
        upper = Node(parent, compact(node.tokens[: count * size + self.lookahead]), compact(node.pages[:count]), node.salt)
        upper.locks, upper.last_use = node.locks, node.last_use
        parent.children.put(self._key(upper.tokens), upper)
        node.parent, node.tokens, node.pages = upper, compact(node.tokens[count * size :]), compact(node.pages[count:])
        upper.children.put(self._key(node.tokens), node)
        return upper

    def _use(self, path: list[tuple[Node, int]]) -> Node | None:
        """Mark exactly the pages of a walked path as used now; returns the node at which it ends."""
        self._clock += 1
        if not path:
            return None
        end = self._cut(*path[-1])
        for node in (*(edge for edge, _ in path[:-1]), end):
            node.last_use = self._clock
        return end

    def _offer(self, node: Node) -> None:
        """Make `node` a candidate for eviction if it is an unlocked leaf."""
        if not (node.in_heap or node.locks or node.children or node.parent is None):
            node.in_heap = True
            heapq.heappush(self._heap, (node.last_use, id(node), node))

    def _trim(self, leaf: Node, count: int) -> Int32:
        """Remove up to `count` pages from the end of an evictable leaf."""
        left = max(0, len(leaf.pages) - count)
        taken = leaf.pages[left:]
        if self.states is not None and leaf.state is not None:
            self.states.release(leaf.state)
            leaf.state = None
        self.total_pages -= len(taken)
        self.evictable_pages -= len(taken)
        if left:
            leaf.pages = compact(leaf.pages[:left])
            leaf.tokens = compact(leaf.tokens[: left * self.page_size + self.lookahead])
            self._offer(leaf)
        else:
            self._remove(leaf)
        return taken

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        parent.children.remove(self._key(leaf.tokens))
        leaf.parent = None
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._offer(parent)


def whole_pages(path: list[tuple[Node, int]]) -> int:
    """Number of pages of a walked path."""
    return sum(count for _, count in path)


def shortest_reusable(positions: int, page_size: int) -> int:
    """The shortest prefix of at least `positions` that can be reused completely: its last page is full or has enough positions to copy."""
    rest = positions % page_size
    return positions if rest == 0 or rest >= MIN_COPIED else positions - rest + min(MIN_COPIED, page_size)


def common_prefix_len(a: Int32, b: Int32) -> int:
    """Number of equal leading entries of two int32 arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def compact(view: Int32) -> Int32:
    """`view`, or a copy if its base array has more than twice its size and would be kept alive."""
    base = view.base
    return view.copy() if isinstance(base, np.ndarray) and base.size > 2 * view.size else view
