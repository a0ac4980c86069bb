"""The prefix cache against a plain list of pages, each with its whole history as key."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.batch import Int32
from runtime.mem_cache.kv_page_manager import KVPageManager, RequestPages
from runtime.mem_cache.radix_cache import Node, RadixCache, common_prefix_len


def ints(values: list[int] | range) -> Int32:
    return np.array(values, dtype=np.int32)


class SlowCache:
    """The reference: one entry per page, keyed by salt and all tokens up to its end, lookahead included."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self.page_size, self.lookahead = page_size, lookahead
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.used: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locks: dict[tuple[str, tuple[int, ...]], int] = {}
        self.clock = 0

    def keys(self, ids: list[int], salt: str) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(self.page_size + self.lookahead, len(ids) + 1, self.page_size)
        return [(salt, tuple(ids[:end])) for end in ends]

    def match(self, ids: list[int], salt: str) -> list[int]:
        self.clock += 1
        found = []
        for key in self.keys(ids[: max(0, len(ids) - 1 + self.lookahead)], salt):
            if key not in self.pages:
                break
            self.used[key] = self.clock
            found.append(self.pages[key])
        return found

    def insert(self, ids: list[int], pages: list[int], salt: str) -> int:
        self.clock += 1
        known = 0
        for key, page in zip(self.keys(ids, salt), pages, strict=False):
            known += key in self.pages
            self.pages.setdefault(key, page)
            self.locks.setdefault(key, 0)
            self.used[key] = self.clock
        return known

    def lock(self, ids: list[int], salt: str, count: int, change: int) -> None:
        for key in self.keys(ids, salt)[:count]:
            self.locks[key] += change

    def evict(self, count: int) -> list[int]:
        gone = []
        while len(gone) < count:
            ends = [k for k in self.pages if not self.locks[k] and not any(self.follows(o, k) for o in self.pages)]
            if not ends:
                break
            oldest = min(ends, key=lambda k: self.used[k])
            gone.append(self.pages.pop(oldest))
            del self.used[oldest], self.locks[oldest]
        return gone

    def follows(self, other: tuple[str, tuple[int, ...]], key: tuple[str, tuple[int, ...]]) -> bool:
        return other != key and other[0] == key[0] and other[1][: len(key[1])] == key[1]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("seed", range(25))
def test_the_tree_agrees_with_a_plain_list_of_pages(seed: int, page_size: int, lookahead: int) -> None:
    rng = random.Random(seed)
    fast, slow = RadixCache(page_size, lookahead), SlowCache(page_size, lookahead)
    locked: list[tuple[Node | None, list[int], str, int]] = []
    next_page = 1
    for _ in range(80):
        ids = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        salt = rng.choice(["", "s"])
        match rng.randrange(5):
            case 0 | 1:
                count = max(0, len(ids) - lookahead) // page_size
                pages = list(range(next_page, next_page + count))
                next_page += count
                assert fast.insert(ints(ids), ints(pages), salt)[0] == slow.insert(ids, pages, salt)
            case 2:
                assert fast.match_len(ints(ids), salt) == len(fast.match(ints(ids), salt).pages)
                assert fast.match(ints(ids), salt).pages.tolist() == slow.match(ids, salt)
            case 3:
                if locked and rng.random() < 0.5:
                    node, ids, salt, count = locked.pop(rng.randrange(len(locked)))
                    fast.unlock(node)
                    slow.lock(ids, salt, count, -1)
                else:
                    found = fast.match(ints(ids), salt)
                    assert found.pages.tolist() == slow.match(ids, salt)
                    fast.lock(found.node)
                    slow.lock(ids, salt, len(found.pages), 1)
                    locked.append((found.node, ids, salt, len(found.pages)))
            case _:
                count = rng.randint(1, 4)
                assert sorted(fast.evict(count).tolist()) == sorted(slow.evict(count))
        fast.check()
        assert fast.total_pages == len(slow.pages)
        assert fast.evictable_pages == sum(not n for n in slow.locks.values())


def test_a_match_always_leaves_a_token_to_compute() -> None:
    cache = RadixCache(4, 0)
    cache.insert(ints(range(8)), ints([1, 2]), "")
    assert cache.match_len(ints(range(8)), "") == 1
    assert cache.match_len(ints(range(9)), "") == 2


def test_lookahead_asks_for_agreement_on_one_token_more() -> None:
    cache = RadixCache(4, 1)
    cache.insert(ints(range(9)), ints([1, 2]), "")
    assert cache.match_len(ints([*range(8), 99, 99]), "") == 1
    assert cache.match_len(ints([*range(9), 99]), "") == 2
    assert cache.match_len(ints(range(8)), "") == 1


def test_a_page_whose_lookahead_token_is_unknown_cannot_be_inserted() -> None:
    with pytest.raises(AssertionError, match="token after it"):
        RadixCache(4, 1).insert(ints(range(8)), ints([1, 2]), "")


def test_a_long_prompt_is_one_edge_and_evicts_its_end_first() -> None:
    cache = RadixCache(1, 1)
    ids = ints(range(100_001))
    cache.insert(ids, ints(range(1, 100_001)), "")
    assert cache.match_len(ids, "") == 100_000
    assert sorted(cache.evict(10).tolist()) == list(range(99_991, 100_001))
    assert cache.match_len(ids, "") == 99_990
    node = cache.match(ids, "").node
    assert node is not None
    assert node.parent is not None
    assert node.parent.parent is None
    cache.check()


def test_unlocking_twice_is_caught() -> None:
    cache = RadixCache(1, 0)
    _, node = cache.insert(ints([1]), ints([1]), "")
    cache.lock(node)
    cache.unlock(node)
    with pytest.raises(AssertionError, match="twice"):
        cache.unlock(node)


def test_agreement_counts_leading_equals() -> None:
    assert common_prefix_len(ints([1, 2, 3]), ints([1, 2, 4, 5])) == 2
    assert common_prefix_len(ints([1, 2]), ints([1, 2, 3])) == 2
    assert common_prefix_len(ints([]), ints([1])) == 0
    assert common_prefix_len(ints([2]), ints([1])) == 0


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(15))
def test_every_page_is_free_cached_or_owned(seed: int, page_size: int, lookahead: int) -> None:
    rng = random.Random(seed)
    kv_pages = KVPageManager(40, page_size, lookahead, cache_prefixes=True)
    open_now: list[tuple[RequestPages, Int32]] = []
    for _ in range(150):
        if rng.random() < 0.5:
            ids = ints([rng.randrange(2) for _ in range(rng.randint(1, 20))])
            pages = kv_pages.open(ids, "")
            missing = kv_pages.pages_for(len(ids)) - pages.count
            if missing > kv_pages.available:
                kv_pages.close(pages, ids, 0)
            else:
                kv_pages.grow([pages], [missing])
                open_now.append((pages, ids))
        elif open_now:
            pages, ids = open_now[rng.randrange(len(open_now))]
            if rng.random() < 0.5:
                kv_pages.publish(pages, ids, len(ids) - 1)
            else:
                kv_pages.close(pages, ids, rng.choice([0, len(ids) - 1]))
                open_now = [(h, i) for h, i in open_now if h is not pages]
        kv_pages.check()
        assert kv_pages.own_pages == sum(h.count - h.shared for h, _ in open_now)
        for h, _ in open_now:
            assert len(set(h.ids.tolist())) == h.count
    for pages, ids in open_now:
        kv_pages.close(pages, ids, len(ids) - 1)
    assert (kv_pages.used, kv_pages.own_pages) == (0, 0)
    kv_pages.flush()
    assert kv_pages.allocator.available == 40


def test_without_a_prefix_cache_no_page_is_kept() -> None:
    kv_pages = KVPageManager(8, 1, 0, cache_prefixes=False)
    ids = ints(range(6))
    for _ in range(3):
        pages = kv_pages.open(ids, "")
        assert pages.count == 0
        kv_pages.grow([pages], [6])
        kv_pages.publish(pages, ids, 5)
        kv_pages.close(pages, ids, 5)
        assert kv_pages.allocator.available == 8
