"""The page allocator: every page is allocated at most once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.mem_cache.allocator import PageAllocator


@pytest.mark.parametrize("seed", range(20))
def test_a_page_is_allocated_once(seed: int) -> None:
    rng = random.Random(seed)
    allocator, held = PageAllocator(50), []
    for _ in range(300):
        if rng.random() < 0.5:
            held.append(allocator.alloc(rng.randint(0, min(9, allocator.available))))
        elif held:
            allocator.free(held.pop(rng.randrange(len(held))))
        pages = np.concatenate([np.empty(0, np.int32), *held]).tolist()
        assert len(set(pages)) == len(pages) == 50 - allocator.available
        assert all(1 <= page <= 50 for page in pages)
    for pages in held:
        allocator.free(pages)
    assert sorted(allocator.alloc(50).tolist()) == list(range(1, 51))


def test_a_page_freed_twice_is_caught() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="twice"):
        allocator.free(pages[:1])
    with pytest.raises(AssertionError, match="twice"):
        allocator.free(np.concatenate([allocator.alloc(4)] * 2))


@pytest.mark.parametrize("page", [0, 5, -1])
def test_a_page_that_does_not_exist_is_caught(page: int) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(4)
    with pytest.raises(AssertionError, match="never allocated"):
        allocator.free(np.array([page], dtype=np.int32))


def test_allocating_more_than_available_is_caught() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(AssertionError, match="5 pages requested, 4 are free"):
        allocator.alloc(5)


def test_allocated_ids_are_a_copy() -> None:
    allocator = PageAllocator(4)
    first = allocator.alloc(2)
    seen = first.tolist()
    allocator.free(first)
    allocator.alloc(4)
    assert first.tolist() == seen
