"""Pages that are reused in part: found in the tree, locked until they are copied, counted, and copied in the KV of all models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.batch import Int32, ScheduleBatch
from runtime.mem_cache.kv_page_manager import KVPageManager, RequestPages
from runtime.mem_cache.radix_cache import MIN_COPIED, RadixCache, common_prefix_len, shortest_reusable
from runtime.model_executor import build, target_model
from runtime.sampling_params import SamplingParams
from unit import test_mtp
from unit.driver import Driver
from unit.predicting import VOCAB, plain, speculating
from unit.ranks import ranks
from unit.storm import pools
from unit.test_radix_cache import SlowCache, ints
from unit.test_scheduler import Harness, limits_of
from unit.test_served_speculation import asked, asks_of, plain_texts, serve
from unit.test_tensor_parallel import builder

STEMS = [np.random.default_rng(seed).integers(0, 2, 40).tolist() for seed in range(3)]


# ---- the tree


class WholeCache(SlowCache):
    """The reference, with the definition of a page that is reused in part."""

    def partial(self, ids: list[int], salt: str, whole: int) -> tuple[int, set[int]]:
        """The most positions behind `whole` matching pages that any cached page can give, and the pages that give them; 0: too few."""
        start, ids = whole * self.page_size, ids[: max(0, len(ids) - 1 + self.lookahead)]
        follow = [(tokens, page) for (of, tokens), page in self.pages.items() if of == salt]
        width = start + self.page_size + self.lookahead
        agreed = [(common_prefix_len(ints(list(t)), ints(ids)) - self.lookahead - start, page) for t, page in follow if len(t) == width]
        most = max((count for count, _ in agreed), default=0)
        return (most, {page for count, page in agreed if count == most}) if most >= MIN_COPIED else (0, set())

    def touch(self, page: int) -> None:
        self.used[next(key for key, own in self.pages.items() if own == page)] = self.clock


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "match", "match", "evict", "lock", "unlock"]),
        st.sampled_from(STEMS),
        st.integers(0, 40),
        st.lists(st.integers(0, 1), max_size=20),
        st.sampled_from(["", "s"]),
    ),
    max_size=40,
)


@settings(max_examples=120)
@given(STEPS, st.sampled_from([1, 8, 9, 16]), st.sampled_from([0, 1]))
@example([("insert", STEMS[0], 40, [], ""), ("match", STEMS[0], 20, [1], ""), ("match", STEMS[0], 20, [0], "")], 16, 0)
def test_the_partial_page_is_the_one_that_agrees_longest(steps: list[Any], page_size: int, lookahead: int) -> None:
    fast, slow, locked, next_page = RadixCache(page_size, lookahead), WholeCache(page_size, lookahead), [], 1
    for kind, stem, cut, tail, salt in steps:
        ids = [*stem[:cut], *tail]
        if kind == "insert":
            count = max(0, len(ids) - lookahead) // page_size
            pages = list(range(next_page, next_page + count))
            next_page += count
            assert fast.insert(ints(ids), ints(pages), salt)[0] == slow.insert(ids, pages, salt)
        elif kind == "evict":
            assert sorted(fast.evict(1 + cut // 10).tolist()) == sorted(slow.evict(1 + cut // 10))
        elif kind == "unlock":
            if locked:
                node, key = locked.pop(cut % len(locked))
                fast.unlock(node)
                slow.lock(*key, -1)
        else:
            cached, found, whole = fast.cached_len(ints(ids), salt), fast.match(ints(ids), salt), slow.match(ids, salt)
            assert found.pages.tolist() == whole
            most, pages = slow.partial(ids, salt, len(whole))
            assert cached == len(whole) * page_size + most == fast.cached_len(ints(ids), salt)
            assert (found.partial is None) == (most == 0)
            if found.partial is not None:
                assert (found.partial.count, found.partial.node.parent) == (most, found.node or found.partial.node.parent)
                assert found.partial.page in pages
                assert len(found.partial.node.pages) == 1, "nothing but this page is locked with it"
                slow.touch(found.partial.page)
                if kind == "lock":
                    fast.lock(found.partial.node)
                    tokens = next(key[1] for key, page in slow.pages.items() if page == found.partial.page)
                    locked.append((found.partial.node, (list(tokens), salt, len(whole) + 1)))
                    slow.lock(*locked[-1][1], 1)
        fast.check()
        assert fast.total_pages == len(slow.pages)
        assert fast.evictable_pages == sum(not n for n in slow.locks.values())


def test_of_many_pages_the_one_that_agrees_longest_is_found() -> None:
    cache, rng = RadixCache(64, 0), np.random.default_rng(0)
    pages = np.unique(rng.integers(0, 4, (3000, 64), dtype=np.int32), axis=0)
    for number, tokens in enumerate(rng.permutation(pages), 1):
        cache.insert(tokens, ints([number]), "")
    for _ in range(50):
        ids = pages[rng.integers(len(pages))].copy()
        cut = int(rng.integers(MIN_COPIED, 63))
        ids[cut] = 9
        found = cache.match(ids, "").partial
        assert found is not None
        assert found.count == max(common_prefix_len(tokens, ids) for tokens in pages) == cut
        assert common_prefix_len(found.node.tokens, ids) == cut


def test_fewer_positions_than_pay_are_not_copied() -> None:
    for page_size in (MIN_COPIED, 64):
        for shared in (MIN_COPIED - 1, MIN_COPIED):
            cache = RadixCache(page_size, 0)
            cache.insert(ints(range(64)), ints(range(1, 64 // page_size + 1)), "")
            reused = cache.cached_len(ints([*range(shared), 99, 99]), "")
            assert reused == (shared if shared == MIN_COPIED else 0)


@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 64])
def test_the_least_reusable_prefix_is_the_shortest_that_a_cache_gives(page_size: int) -> None:
    cache = RadixCache(page_size, 0)
    cache.insert(ints(range(256)), ints(range(1, 256 // page_size + 1)), "")
    given = [cache.cached_len(ints([*range(shared), 999, 999]), "") for shared in range(200)]
    for least in range(1, 120):
        assert shortest_reusable(least, page_size) == next(length for length in given if length >= least)


def test_a_page_just_copied_is_evicted_last() -> None:
    cache = RadixCache(16, 0)
    for number in (1, 2, 3):
        cache.insert(ints([number] * 32), ints([2 * number, 2 * number + 1]), "")
    assert cache.cached_len(ints([2] * 12), "") == cache.match(ints([1] * 12 + [9]), "").pages.size + 11
    assert [cache.evict(1).tolist() for _ in range(6)] == [[3], [5], [4], [7], [6], [2]]


def test_parts_of_a_cut_edge_keep_no_long_array_alive() -> None:
    cache = RadixCache(16, 0)
    cache.insert(ints(range(16_000)), ints(range(1, 1001)), "")
    found = cache.match(ints([*range(20), 7, 7, *range(24, 30)]), "")
    assert found.partial is None
    found = cache.match(ints([*range(28), 7, 7]), "")
    assert found.node is not None
    assert found.partial is not None
    for node in (found.node, found.partial.node):
        assert all(array.base is None or array.base.size <= 2 * array.size for array in (node.tokens, node.pages))


# ---- pages


class Opened:
    """A request of the page manager whose prompt is being computed."""

    def __init__(self, manager: KVPageManager, ids: Int32) -> None:
        self.ids, self.pages = ids, manager.open(ids, "")
        self.source = None if self.pages.partial is None else self.pages.partial.page


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "open", "publish", "close", "drop"]),
            st.sampled_from(STEMS),
            st.integers(1, 40),
            st.lists(st.integers(0, 1), max_size=20),
            st.integers(0, 99),
        ),
        max_size=60,
    ),
    st.sampled_from([0, 1]),
)
def test_a_source_stays_cached_until_it_was_copied(steps: list[Any], lookahead: int) -> None:
    manager, alive = KVPageManager(12, 16, lookahead, cache_prefixes=True), list[Opened]()
    for kind, stem, cut, tail, which in steps:
        ids, one = ints([*stem[:cut], *tail]), alive[which % len(alive)] if alive else None
        if kind == "open":
            expected = manager.cached_len(ids, "")
            one = Opened(manager, ids)
            assert manager.reused_len(one.pages) == expected < len(ids)
            missing = manager.pages_for(len(ids)) - one.pages.count
            if missing > manager.available:
                manager.close(one.pages, ids, 0)
            else:
                manager.grow([one.pages], [missing])
                alive.append(one)
        elif one is not None:
            one.source = None
            if kind == "drop":
                manager.drop_partial(one.pages)
            elif kind == "publish":
                manager.publish(one.pages, one.ids, len(one.ids) - 1)
            else:
                manager.close(one.pages, one.ids, (len(one.ids) - 1) * (which % 2))
                alive.remove(one)
        manager.check()
        owned = {page for each in alive for page in each.pages.ids[each.pages.shared :].tolist()}
        for each in alive:
            assert each.source is None or not (each.source in owned or manager.allocator._is_free[each.source])
    for each in alive:
        manager.close(each.pages, each.ids, 0)
    assert (manager.used, manager.own_pages) == (0, 0)
    manager.flush()
    assert manager.allocator.available == 12


def test_a_locked_source_is_not_handed_out_and_can_be_dropped() -> None:
    manager = KVPageManager(4, 16, 0, cache_prefixes=True)
    first = manager.open(ints(range(40)), "")
    manager.grow([first], [3])
    manager.close(first, ints(range(40)), 40)
    pages = manager.open(ints([*range(28), *range(90, 120)]), "")
    assert (pages.count, manager.reused_len(pages), manager.available) == (1, 28, 2)
    manager.drop_partial(pages)
    assert (manager.reused_len(pages), manager.available) == (16, 3)
    manager.close(pages, ints([]), 0)
    manager.check()


def test_nothing_is_copied_without_a_prefix_cache_or_when_the_whole_prompt_is_wanted() -> None:
    for cache_prefixes, reuse in ((False, True), (True, False)):
        manager = KVPageManager(8, 16, 0, cache_prefixes=cache_prefixes)
        pages: RequestPages = manager.open(ints(range(20)), "")
        manager.grow([pages], [2])
        manager.close(pages, ints(range(20)), 20)
        assert manager.open(ints([*range(12), 99, 99]), "", reuse=reuse).partial is None


# ---- scheduler


def copies(batches: list[ScheduleBatch]) -> list[tuple[int, int, int]]:
    """Source, target and count of all copies."""
    flat = [part for batch in batches for part in batch.parts]
    return [c for b in flat for c in zip(b.copy_sources.tolist(), b.copy_targets.tolist(), b.copy_counts.tolist(), strict=True)]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("shared", "cached"), [(7, 0), (8, 8), (63, 63), (64, 64), (70, 64), (72, 72), (100, 100)])
def test_a_prompt_computes_only_what_differs(shared: int, cached: int, lookahead: int) -> None:
    harness = Harness(limits_of(page_size=64, max_total_tokens=1024, max_context_len=200, prefix_lookahead=lookahead))
    stem = [i % 37 for i in range(shared + lookahead)]
    for rid, prompt in (("a", [*stem, *[39] * 200]), ("a2", [*stem[:6], *[38] * 200]), ("a3", [*stem[:50], *[37] * 200])):
        harness.ask(rid, prompt[:140], max_new_tokens=1)
        harness.run_until_idle()
    seen = len(harness.worker.batches)
    b = harness.ask("b", [*stem, 5, 6, 7], max_new_tokens=9, ignore_eos=True)
    harness.run_until_idle()
    harness.check_answer(b)
    assert harness.outs("b")[-1].progress.cached_tokens == cached
    prompts = [batch for batch in harness.worker.batches[seen:] if batch.num_prompts]
    assert sum(int(batch.extend_lens.sum()) for batch in prompts) == len(b.input_ids) - cached
    assert [count for *_, count in copies(harness.worker.batches[seen:])] == ([cached % 64] if cached % 64 else [])
    assert not copies(prompts[1:]), "only the first chunk is behind a copy"
    harness.check_empty()


def test_prompts_of_one_step_copy_from_one_page() -> None:
    harness = Harness(limits_of(page_size=16), chunked_prefill_size=64)
    stem = list(range(20))
    harness.ask("a", [*stem, *range(20, 33)], max_new_tokens=1)
    harness.run_until_idle()
    asked = [harness.ask(f"r{i}", [*stem[:12], 33 + i, 4, 5], max_new_tokens=6) for i in range(3)]
    harness.run_until_idle()
    for req in asked:
        harness.check_answer(req)
        assert harness.outs(req.rid)[-1].progress.cached_tokens == 12
    found = copies(harness.worker.batches)
    assert [count for *_, count in found] == [12, 12, 12]
    assert len({source for source, *_ in found}) == 1
    assert len({target for _, target, _ in found}) == 3
    harness.check_empty()


def test_a_request_that_needs_all_pages_takes_the_source_as_well() -> None:
    harness = Harness(limits_of(page_size=16, max_total_tokens=64, max_context_len=64))
    harness.ask("a", list(range(40)), max_new_tokens=1)
    harness.run_until_idle()
    b = harness.ask("b", [*range(12), *[39] * 45], max_new_tokens=7, ignore_eos=True)
    harness.run_until_idle()
    harness.check_answer(b)
    assert harness.outs("b")[-1].progress.cached_tokens == 0
    assert not copies(harness.worker.batches)
    harness.check_empty()


def test_requests_are_retracted_and_resumed_behind_copies() -> None:
    harness = Harness(limits_of(page_size=16, max_total_tokens=160), schedule_conservativeness=0.0)
    stem = [i % 30 for i in range(44)]
    asked = [harness.ask(f"r{i}", [*stem, *[30 + i] * 6], max_new_tokens=60, ignore_eos=True) for i in range(4)]
    harness.run_until_idle()
    for req in asked:
        harness.check_answer(req)
    assert harness.scheduler.stats.num_retracted_requests_total > 0
    assert copies(harness.worker.batches)
    harness.check_empty()


# ---- workers

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)
CONTEXT = 256
LENGTHS = {1: [0, 9, 30], 16: [0, 5, 9, 16, 27, 47, 52, 40], 64: [0, 20, 64, 71, 100, 140, 191, 199]}
"""Positions that prompts share with the first one, by page size."""
WORKERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "EAGLE": ("EAGLE", {}),
    "EAGLE3": ("EAGLE3", {"num_steps": 2}),
    "EAGLE3 tree": ("EAGLE3", {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}),
    "STANDALONE": ("STANDALONE", {"num_steps": 2}),
    "DFLASH": ("DFLASH", {"num_steps": 4}),
    "NGRAM": ("NGRAM", {}),
}
ROOMY: dict[str, Any] = {"context_length": CONTEXT, "max_running_requests": 8}


def sharing(page: int) -> list[list[int]]:
    """A prompt of more than three pages, and prompts that share some positions with it."""
    rng = np.random.default_rng(page)
    stem = rng.integers(2, VOCAB, max(*LENGTHS[page], 3 * page) + 2).tolist()
    return [stem, *([*stem[:shared], *rng.integers(2, VOCAB, 4).tolist()] for shared in LENGTHS[page])]


@functools.cache
def uncached(page: int) -> dict[str, list[int]]:
    """The texts of `sharing(page)` without a prefix cache."""
    return serve(plain(**ROOMY), asked(GREEDY, sharing(page)), {}, context_length=CONTEXT, radix_cache=False)[0]


def watched(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[ScheduleBatch]:
    """The batches that a worker is given."""
    seen, submit = list[ScheduleBatch](), worker.submit

    def keep(batch: ScheduleBatch) -> Any:
        seen.append(batch)
        return submit(batch)

    monkeypatch.setattr(worker, "submit", keep)
    return seen


def warm(worker: Any, page: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Check the texts of prompts that share positions with the first, and that they are not computed again."""
    batches, ids, cached = watched(worker, monkeypatch), sharing(page), dict[str, int]()
    options = {"context_length": CONTEXT, "max_prefill_tokens": CONTEXT, "page_size": page, **settings}
    first, *others = asked(GREEDY, ids)
    got, scheduler = serve(
        worker, [first], {}, hear=lambda out: cached.update({out.rid: out.progress.cached_tokens}), then=others, **options
    )
    assert got == uncached(page)
    assert scheduler.stats.num_failed_steps_total == 0
    agreed = [n - worker.limits.prefix_lookahead for n in LENGTHS[page]]
    wanted = [n // page * page + (n % page if n % page >= MIN_COPIED else 0) for n in agreed]
    assert all(cached[str(i)] >= n for i, n in enumerate(wanted, 1))
    assert len(copies(batches)) >= (3 if page > 1 else 0)


@pytest.mark.parametrize(("name", "page"), [*((name, 64) for name in WORKERS), ("plain", 1), ("plain", 16), ("EAGLE3 tree", 16)])
def test_a_warm_cache_changes_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, page: int) -> None:
    algorithm, spec = WORKERS[name]
    runtime = {**ROOMY, "page_size": page}
    if algorithm is None:
        worker = plain("eager", [2, 4, 8], **runtime)
    else:
        worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=runtime, **spec)
    warm(worker, page, monkeypatch, chunked_prefill_size=24 if page == 16 else 128)


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_beside_decoding_and_retraction_change_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    tight = {"context_length": 96, "max_running_requests": 8, "page_size": 16, "max_total_tokens": 320, "mixed_chunk": True}
    worker = speculating(tmp_path, "EAGLE", "eager", [2, 4, 8], runtime=tight)
    batches = watched(worker, monkeypatch)
    got, scheduler = serve(
        worker, asks_of("greedy"), {}, page_size=16, overlap=overlap, schedule_conservativeness=0.05, chunked_prefill_size=48
    )
    assert got == plain_texts("greedy")
    assert scheduler.stats.num_retracted_requests_total > 0
    assert copies([batch for batch in batches if batch.num_decodes])


def test_copies_reach_the_kv_of_a_layer_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention, where values are a view of keys."""
    model, long = test_mtp.latent_model(), np.random.default_rng(0).integers(0, VOCAB, 60).tolist()
    expected = Driver(test_mtp.plain(model)).generate({2: [*long[:50], 5, 6]}, 12)[2]
    driver = Driver(test_mtp.drafting(model, {"page_size": 64}, num_steps=3))
    driver.prefill({1: long}, chunk=7)
    driver.prefill({2: [*long[:50], 5, 6]}, shared={2: (1, 49)})
    while len(driver.out[2]) < 12:
        driver.decode([2, 1])
    assert driver.out[2][:12] == expected


@pytest.mark.parametrize("name", ["plain", "EAGLE3", "STANDALONE", "DFLASH", "EAGLE3 tree"])
def test_the_front_of_a_page_is_copied_bit_for_bit_in_every_pool(tmp_path: Path, name: str) -> None:
    algorithm, spec = WORKERS[name]
    worker = plain(page_size=16) if algorithm is None else speculating(tmp_path, algorithm, runtime={"page_size": 16}, **spec)
    driver, long = Driver(worker), np.random.default_rng(1).integers(0, VOCAB, 40).tolist()
    driver.prefill({1: long})
    driver.prefill({2: [*long[:30], 5, 6, 7], 3: [*long[:13], 9]}, shared={2: (1, 29), 3: (1, 12)})
    for row, count in ((2, 29), (3, 12)):
        for pool in pools(worker):
            for tensor in (*pool.k, *pool.v):
                source, target = (tensor.flatten(0, 1)[driver.slots(r, count)] for r in (1, row))
                assert source.equal(target)
    assert len(pools(worker)) == len(worker.parts.kv_pools) == 1 + (algorithm is not None)


def test_other_ranks_copy_their_part(tmp_path: Path) -> None:
    build = builder(tmp_path, ("EAGLE3", {"num_steps": 2, "num_draft_tokens": 3}), page_size=16)
    long = np.random.default_rng(2).integers(2, VOCAB, 40).tolist()
    texts = []
    for size in (1, 2):
        with ranks(size, build) as worker:
            driver = Driver(worker)
            driver.prefill({1: long})
            driver.prefill({2: [*long[:30], 5, 6]}, shared={2: (1, 29 if size == 2 else 0)})
            for _ in range(6):
                driver.decode([1, 2])
            texts.append({row: driver.out[row][:6] for row in (1, 2)})
            assert size == 1 or not worker.parts.target.agreement.differs.item()
    assert texts[0] == texts[1]


# ---- many at once


def test_any_number_of_requests_may_begin_behind_long_prefixes_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, sampling = np.random.default_rng(5).integers(2, VOCAB, 400).tolist(), SamplingParams(temperature=0.0, max_new_tokens=4)
    asks = asked(sampling, [[*prompt, i] for i in range(8)])
    worker, settings = plain(context_length=512, max_running_requests=8), {"context_length": 512, "chunked_prefill_size": 64}
    expected, _ = serve(worker, asks, {}, radix_cache=False, **settings)
    for module in (build, target_model):
        monkeypatch.setattr(module, "PAGES_AT_ONCE", 100)
    worker = plain(context_length=512, max_running_requests=8)
    begun, submit = list[int](), worker.submit
    monkeypatch.setattr(worker, "submit", lambda batch: begun.append(len(batch.page_ids)) or submit(batch))
    got, scheduler = serve(worker, asks, {}, **settings)
    assert max(begun) > 7 * 400
    assert scheduler.stats.num_failed_steps_total == 0
    assert got == expected
