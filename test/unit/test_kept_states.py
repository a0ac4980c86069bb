"""Recurrent states that prompts leave for later prompts: where, for how long, and that no request begins with a wrong one."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.batch import Int32, WorkerLimits
from runtime.managers import kept_states
from runtime.managers.messages import AbortReq, GenerateReq
from runtime.managers.req import Req
from runtime.mem_cache.kv_page_manager import KVPageManager, RequestPages
from runtime.mem_cache.state_slots import StateSlots
from runtime.sampling_params import SamplingParams
from unit.test_scheduler import Harness, limits_of, storm_limits, storm_prompts


def ints(values: Any) -> Int32:
    return np.array(values, dtype=np.int32)


# ---- slots


def test_the_state_used_longest_ago_is_dropped_for_a_new_one() -> None:
    slots = StateSlots(2)
    first, second = slots.reserve(), slots.reserve()
    assert first is not None
    assert second is not None
    assert slots.reserve() is None  # both are reserved
    slots.attach(first)
    slots.attach(second)
    slots.use(first)
    third = slots.reserve()
    assert third is not None
    assert (third.slot, first.alive, second.alive, slots.used) == (1, True, False, 1)
    slots.release(second)  # it has no slot any more
    slots.release(third)
    slots.release(first)
    slots.check()
    assert slots.used == 0
    assert StateSlots(0).reserve() is None


# ---- the prefix cache


class SlowPrefixes:
    """What a cache without eviction of pages knows: for each prefix of whole pages with a state, the state."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self.page_size, self.lookahead = page_size, lookahead
        self.states: dict[tuple[int, ...], Any] = {}

    def cached_len(self, ids: list[int]) -> int:
        fits = [
            len(key) - self.lookahead
            for key, state in self.states.items()
            if state.alive and ids[: len(key)] == list(key) and len(key) - self.lookahead < len(ids)
        ]
        return max(fits, default=0)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_a_prefix_is_reusable_up_to_a_state_that_was_left_in_it(seed: int, page_size: int, lookahead: int) -> None:
    rng, slots = random.Random(seed), StateSlots(6)
    kv_pages, slow = KVPageManager(4000, page_size, lookahead, True, slots), SlowPrefixes(page_size, lookahead)
    hits, stems = 0, [[rng.randrange(2) for _ in range(24)] for _ in range(3)]
    open_now: list[tuple[RequestPages, Int32, list[tuple[int, Any]]]] = []
    for _ in range(120):
        if rng.random() < 0.5:
            ids = rng.choice(stems)[: rng.randint(1, 24)] + [rng.randrange(2) for _ in range(rng.randint(1, 4))]
            assert kv_pages.cached_len(ints(ids), "") == slow.cached_len(ids)
            pages = kv_pages.open(ints(ids), "")
            start = kv_pages.reused_len(pages)
            assert start == slow.cached_len(ids)
            assert (pages.state is None) == (start == 0)
            hits += pages.state is not None
            kv_pages.grow([pages], [kv_pages.pages_for(len(ids)) - pages.count])
            places = [n for n in range(start + page_size, len(ids), page_size) if n % page_size == 0]
            kept = [(n, kv_pages.keep_state(pages, n)) for n in sorted(rng.sample(places, min(len(places), rng.randint(0, 2))))]
            open_now.append((pages, ints(ids), [(n, state) for n, state in kept if state is not None]))
        elif open_now:
            pages, ids, kept = open_now.pop(rng.randrange(len(open_now)))
            kv_len = rng.choice([0, len(ids) // 2, len(ids) - 1])
            if kv_len == len(ids) - 1 and rng.random() < 0.5:
                kv_pages.publish(pages, ids, kv_len)
            kv_pages.close(pages, ids, kv_len)
            for length, state in kept:
                if state.alive:
                    assert length <= kv_len
                    slow.states[tuple(ids[: length + lookahead].tolist())] = state
        kv_pages.check()
    for pages, ids, _ in open_now:
        kv_pages.close(pages, ids, 0)
    kv_pages.check()
    assert kv_pages.own_pages == 0
    assert hits > 3
    kv_pages.flush()
    kv_pages.check()
    assert (slots.used, kv_pages.allocator.available) == (0, 4000)
    assert [slots.reserve() is not None for _ in range(7)] == [True] * 6 + [False]


def test_a_state_goes_with_the_pages_before_it() -> None:
    slots = StateSlots(3)
    kv_pages, ids = KVPageManager(6, 1, 0, True, slots), ints(range(7))
    pages = kv_pages.open(ids, "")
    kv_pages.grow([pages], [6])
    kv_pages.keep_state(pages, 2)
    kv_pages.keep_state(pages, 6)
    kv_pages.close(pages, ids, 6)
    assert (kv_pages.cached_len(ids, ""), slots.used) == (6, 2)
    other = kv_pages.open(ints([50]), "")
    kv_pages.grow([other], [1])  # takes the last page
    kv_pages.check()
    assert (kv_pages.cached_len(ids, ""), slots.used) == (2, 1)


# ---- where states are left

LIMITS = limits_of(state_unit=64, cached_states=8, page_size=16, max_context_len=4096, prefix_lookahead=1)


def request(prompt: list[int], salt: str = "", kv_bound: int = 0) -> Req:
    asked = GenerateReq(rid="", input_ids=prompt, sampling=SamplingParams(), seed=0, cache_salt=salt)
    req = Req(asked, ints(prompt), 0, (), 4096, 0.0)
    req.kv_bound = kv_bound
    return req


TEXT = list(range(2000))


@pytest.mark.parametrize(
    ("length", "start", "known", "peers", "expected"),
    [
        (1000, 0, 0, [], [960]),
        (961, 0, 0, [], [960]),
        (960, 0, 0, [], [896]),  # a later prompt needs a token behind the state
        (300, 0, 0, [], [256]),
        (256, 0, 0, [], []),  # too short to be worth a state
        (1000, 768, 0, [], []),
        (1000, 704, 0, [], [960]),
        (1000, 0, 640, [], [640, 960]),  # others had these tokens, but left no state
        (1000, 0, 800, [], [768]),  # the end is too close behind it
        (1000, 0, 0, [500], [448, 960]),  # another waits that has 500 tokens in common
        (1000, 0, 0, [513, 300], [512, 960]),
        (1000, 0, 0, [512], [448, 960]),  # the draft looks a token ahead
        (1000, 512, 0, [513], [960]),
        (1000, 0, 0, [1000], [960]),
    ],
)
def test_states_are_left_where_prompts_part_and_near_the_end(
    length: int, start: int, known: int, peers: list[int], expected: list[int]
) -> None:
    waiting = [request(TEXT[:n] + [7] * 50) for n in peers]
    req = request(TEXT[:length])
    assert kept_states.kept_lens(req, start, known, waiting, LIMITS) == expected
    assert kept_states.kept_lens(req, start, known, waiting, replace(LIMITS, cached_states=0)) == []
    others = [request(each.ids.tolist(), "other salt") for each in waiting]
    alone = kept_states.kept_lens(req, start, known, [], LIMITS)
    assert kept_states.kept_lens(req, start, known, others, LIMITS) == alone


@pytest.mark.parametrize(
    ("start", "count", "first", "expected"),
    [
        (0, 1000, False, 1000),
        (0, 999, False, 960),
        (960, 40, False, 40),
        (960, 39, False, 0),  # waits for a step with more room
        (960, 39, True, 39),  # no step has more
        (0, 64, False, 64),
        (0, 63, False, 0),
        (63, 3, False, 1),
    ],
)
def test_chunks_end_at_multiples(start: int, count: int, first: bool, expected: int) -> None:
    assert kept_states.whole_units(start, count, 1000, 64, first=first) == expected


@pytest.mark.parametrize(
    ("kept", "start", "count", "expected", "left"),
    [
        ([448, 960], 0, 1000, (448, 448), 2),  # one state per chunk
        ([448, 960], 448, 552, (552, 960), 2),
        ([448, 960], 0, 640, (640, 448), 2),
        ([960], 0, 960, (960, 960), 1),
        ([960], 960, 40, (40, 0), 1),
        ([960], 0, 39, (39, 0), 0),  # nothing is left behind an odd start
        ([], 0, 1000, (1000, 0), 0),
    ],
)
def test_a_chunk_leaves_one_state(kept: list[int], start: int, count: int, expected: tuple[int, int], left: int) -> None:
    req = request(TEXT[:1000], kv_bound=start)
    req.kept_lens = kept
    assert kept_states.state_in_chunk(req, count, 64) == expected
    assert len(req.kept_lens) == left


def test_a_prompt_waits_only_for_a_state_that_it_can_begin_with() -> None:
    other = request(TEXT[:1000])
    other.kept_lens = [448, 960]
    for length, cached, waits in (
        (1000, 0, True),
        (449, 0, True),
        (448, 0, False),
        (600, 200, False),
        (1000, 448, True),
        (1000, 960, False),
    ):
        assert kept_states.defer_for_state(request(TEXT[:length]), cached, [other], LIMITS) == waits, (length, cached)
    assert not kept_states.defer_for_state(request(TEXT[:448] + [7] * 300), 0, [other], LIMITS)  # parts at the token that the draft needs
    assert not kept_states.defer_for_state(request(TEXT[:1000], "other salt"), 0, [other], LIMITS)


# ---- a scheduler


def state_limits(rng: random.Random) -> WorkerLimits:
    limits = storm_limits(rng)
    unit = math.lcm(4, limits.page_size)
    unit *= 1 + limits.tokens_per_step // unit
    return replace(limits, state_unit=unit, cached_states=rng.choice([0, 1, 3, 30]))


@pytest.mark.parametrize("seed", range(80))
def test_a_storm_begins_no_request_with_a_wrong_state(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(kept_states, "LEAST_TOKENS", rng.choice([1, 8]))
    limits = state_limits(rng)
    harness = Harness(
        limits,
        chunked_prefill_size=rng.choice([-1, 5, 16, 64]),
        schedule_policy=rng.choice(["fcfs", "lpm"]),
        schedule_conservativeness=rng.choice([0.0, 1.0]),
        radix_cache=rng.random() < 0.9,
    )
    prompts, asked, gone = storm_prompts(rng), [], set()
    for i in range(24):
        fields: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 8, 30]), "ignore_eos": rng.random() < 0.4}
        fields |= {"cache_salt": rng.choice(["", "", "other"]), "client": rng.choice("ab")}
        asked.append(harness.ask(f"r{i}", next(prompts), rng.randrange(3), **fields))
        harness.step(rng.choice([0, 0, 1, 4]))
        if rng.random() < 0.2:
            gone.add(victim := f"r{rng.randrange(i + 1)}")
            harness.inbox.append(AbortReq(rid=victim))
    harness.run_until_idle()
    for req in asked:
        if req.rid not in gone:
            harness.check_answer(req)
    states = harness.scheduler.groups.only.kv_pages.states
    assert states is not None
    harness.check_empty()
    assert states.used == 0
    assert sum(states.reserve() is not None for _ in range(limits.cached_states + 1)) == limits.cached_states


def test_prompts_with_a_common_beginning_compute_it_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "LEAST_TOKENS", 8)
    limits = limits_of(state_unit=4, cached_states=16, max_context_len=128, max_total_tokens=2048)
    stem = list(range(10, 32))
    together = Harness(limits, chunked_prefill_size=64, max_prefill_tokens=256)
    asked = [together.ask(f"r{i}", [*stem, i, i + 1, i + 2], max_new_tokens=4, ignore_eos=True) for i in range(8)]
    together.run_until_idle()
    for req in asked:
        together.check_answer(req)
    # The first computes all its 25 tokens, and leaves its state after 20 tokens because the others wait.
    assert together.scheduler.stats.cached_tokens_total == 7 * 20
    one_by_one = Harness(limits, chunked_prefill_size=64)
    cached = []
    for i in range(4):
        req = one_by_one.ask(f"r{i}", [*stem, i, i + 1, i + 2], max_new_tokens=4, ignore_eos=True)
        one_by_one.run_until_idle()
        one_by_one.check_answer(req)
        cached.append(one_by_one.outs(req.rid)[-1].progress.cached_tokens)
    # Of the first the state after 24 tokens is cached; the second finds where they part.
    assert cached == [0, 0, 20, 20]


def test_a_conversation_begins_behind_its_last_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "LEAST_TOKENS", 8)
    harness = Harness(limits_of(state_unit=4, cached_states=16, prefix_lookahead=1, max_accept_len=3, tokens_per_step=3))
    prompt, cached = list(range(10, 31)), []
    for turn in range(4):
        req = harness.ask(f"r{turn}", prompt, max_new_tokens=5, ignore_eos=True)
        harness.run_until_idle()
        harness.check_answer(req)
        cached.append(harness.outs(req.rid)[-1].progress.cached_tokens)
        prompt = prompt + harness.tokens(req.rid) + [5, 6, 7, 8]
    assert cached == [0, 20, 28, 36]
    state = harness.scheduler.current_stats().figures()
    assert (state["cached_states"], state["max_cached_states"], state["mamba_usage"]) == (4, 16, 0.25)
    harness.check_empty()
