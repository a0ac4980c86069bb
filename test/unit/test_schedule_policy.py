"""Scheduling decisions as functions of requests and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.batch import WorkerLimits
from runtime.managers import schedule_policy as policy
from runtime.managers.messages import Finish, GenerateReq
from runtime.managers.new_token_ratio import NewTokenRatio
from runtime.managers.prefill_budget import FEW_PROMPTS, PrefillBudget
from runtime.managers.req import Req
from runtime.mem_cache.kv_page_manager import RequestPages
from runtime.sampling_params import SamplingParams
from unit.tiny import tiny_runtime

LIMITS = WorkerLimits(
    max_total_tokens=1000, max_running_requests=8, max_context_len=100, max_extend_tokens=64, page_size=1, vocab_size=50, tokens_per_step=4
)


def req(seq: int, prompt: list[int] | None = None, retracted: bool = False, priority: int = 0, salt: str = "", **sampling: Any) -> Req:
    request = GenerateReq(
        rid=f"r{seq}", input_ids=prompt or [seq], sampling=SamplingParams(**sampling), seed=0, priority=priority, cache_salt=salt
    )
    made = Req(request, np.array(request.input_ids, dtype=np.int32), seq, (3,), LIMITS.max_context_len, 0.0)
    made.retracted = retracted
    return made


def budget_of(chunk: int, most: int, limits: WorkerLimits = LIMITS, prompts: int = 0, waiting: int = 0, **settings: Any) -> PrefillBudget:
    config = tiny_runtime(chunked_prefill_size=chunk, max_prefill_tokens=most, **settings).scheduler
    return PrefillBudget.start(config, limits, prompts, waiting)


def running(**sampling: Any) -> Req:
    """A request that has a row."""
    made = req(1, **sampling)
    made.admit(1, RequestPages(""), 0, 0.0)
    return made


def test_the_queue_puts_retracted_first_then_priority_then_arrival() -> None:
    queue = [req(3), req(2, priority=1), req(1), req(5, retracted=True), req(4, retracted=True), req(6, priority=-1)]
    assert [one.seq for one in sorted(queue, key=policy.queue_key)] == [4, 5, 2, 1, 3, 6]


def test_lpm_moves_long_cached_prefixes_ahead_among_equals_only() -> None:
    queue = [req(5, retracted=True), req(4, priority=1), req(1), req(2), req(3)]
    cached = {5: 0, 4: 0, 1: 7, 2: 9, 3: 7}
    assert [one.seq for one in policy.order(queue, "fcfs", lambda r: cached[r.seq])] == [5, 4, 1, 2, 3]
    assert [one.seq for one in policy.order(queue, "lpm", lambda r: cached[r.seq])] == [5, 4, 2, 1, 3]


def test_lpm_leaves_a_very_long_queue_alone() -> None:
    queue = [req(i) for i in range(policy.LPM_QUEUE_LIMIT + 1)]

    def never(_: Req) -> int:
        raise AssertionError("matched")

    assert policy.order(queue, "lpm", never) == queue


def test_the_youngest_of_lowest_priority_is_retracted() -> None:
    assert policy.youngest([req(1), req(3), req(2)]).seq == 3
    assert policy.youngest([req(1, priority=-1), req(3), req(2)]).seq == 1


@pytest.mark.parametrize(
    ("chunked", "wanted", "first", "offered"),
    [
        (32, 100, True, 32),
        (32, 10, False, 10),
        (-1, 48, False, 48),
        (-1, 49, False, 0),
        (-1, 60, True, 60),
        (-1, 200, True, 64),
    ],
)
def test_a_budget_offers_what_fits(chunked: int, wanted: int, first: bool, offered: int) -> None:
    assert budget_of(chunked, 48).offer(wanted, first) == offered


def test_a_budget_is_the_smallest_of_its_caps_and_runs_out() -> None:
    budget = budget_of(1000, 1000)
    assert budget.left == LIMITS.max_extend_tokens
    budget.take(60)
    assert budget.offer(10, False) == 4
    budget.take(4)
    assert budget.offer(10, False) == 0


@pytest.mark.parametrize(("prompts", "offered"), [(1, 0), (FEW_PROMPTS, 0), (FEW_PROMPTS + 1, 10)])
def test_with_few_prompts_a_saturated_step_takes_no_other(prompts: int, offered: int) -> None:
    budget = budget_of(64, 64, replace(LIMITS, saturating_tokens=20), prompts)
    assert budget.offer(19, True) == 19
    budget.take(19)
    assert budget.offer(10, False) == 10, "the device is not saturated yet"
    budget.take(1)
    assert budget.offer(10, False) == offered
    budget = budget_of(64, 64, LIMITS, 1)
    budget.take(63)
    assert budget.offer(10, False) == 1, "if the saturating size is unknown, as many as fit"


@pytest.mark.parametrize(
    ("waiting", "most", "left"),
    [(0, 64, 8), (159, 64, 8), (160, 64, 40), (1000, 64, 40), (1000, 30, 30)],
)
def test_chunks_are_larger_while_many_tokens_wait(waiting: int, most: int, left: int) -> None:
    assert budget_of(8, most, waiting=waiting, largest_chunk_size=40).left == left
    assert budget_of(8, most, waiting=waiting).left == 8, "there is no larger size"


def test_the_new_token_ratio_decays_to_a_floor_and_resets() -> None:
    ratio = NewTokenRatio(1.0)
    one = req(1, max_new_tokens=90)
    slack = LIMITS.tokens_per_step + LIMITS.max_accept_len
    assert ratio.slots(one, LIMITS) == 1 + int(90 * 0.7) + slack
    for _ in range(2000):
        ratio.decay()
    assert ratio.slots(one, LIMITS) == 1 + int(90 * 0.14) + slack
    ratio.reset()
    assert ratio.slots(one, LIMITS) == 1 + int(90 * 0.7) + slack
    assert NewTokenRatio(9.0).value == 1.0


@pytest.mark.parametrize(
    ("prompt_len", "total", "per_step", "slots"),
    [(10, 11, 4, 10), (10, 12, 1, 11), (10, 12, 4, 14), (10, 30, 4, 32), (10, 30, 1, 29)],
)
def test_slots_alone_cover_the_last_decode_step(prompt_len: int, total: int, per_step: int, slots: int) -> None:
    assert policy.slots_alone(prompt_len, total, per_step) == slots


def test_decode_slots_never_pass_the_page_table() -> None:
    assert policy.decode_slots(99, LIMITS) == 99 + 4
    assert policy.decode_slots(400, LIMITS) == 108


def test_a_request_is_deferred_only_if_that_saves_enough() -> None:
    stem = [7] * 40
    other = req(1, [*stem, 1])
    assert policy.defer_for_shared_prefix(req(2, [*stem, 2]), 0, [other], LIMITS)
    assert not policy.defer_for_shared_prefix(req(2, [*stem, 2]), 20, [other], LIMITS)
    assert not policy.defer_for_shared_prefix(req(2, [*stem, 2], salt="s"), 0, [other], LIMITS)
    assert not policy.defer_for_shared_prefix(req(2, [7] * 20), 0, [other], LIMITS)
    assert not policy.defer_for_shared_prefix(req(2, [8] * 40), 0, [other], LIMITS)
    assert not policy.defer_for_shared_prefix(req(2, [*stem, 2]), 0, [], LIMITS)


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"), [([5, 6], 2, None), ([5, 3, 6], 2, "stop"), ([5, 9, 6], 2, "stop"), ([5] * 9, 7, "length")]
)
def test_tokens_after_the_end_are_dropped(tokens: list[int], kept: int, reason: str | None) -> None:
    one = running(max_new_tokens=7, stop_token_ids=(9,))
    finish = one.commit(tokens)
    assert one.completion_tokens == kept
    assert (finish.reason if finish else None) == reason


def test_endings_wait_for_the_minimum_and_may_be_ignored() -> None:
    late = running(max_new_tokens=9, min_new_tokens=2)
    assert late.commit([3, 3]) is None
    finish = late.commit([3])
    assert finish is not None
    assert finish.matched == 3
    unending = running(max_new_tokens=3, ignore_eos=True)
    finish = unending.commit([3, 3, 3])
    assert finish is not None
    assert finish.reason == "length"


def test_tokens_of_many_steps_are_all_kept() -> None:
    made, given = running(max_new_tokens=200, ignore_eos=True), list(range(4, 94))
    for at in range(0, 90, 3):
        assert made.commit(given[at : at + 3]) is None
        if at == 30:
            assert made.ids.tolist() == [1, *given[:33]]
    assert made.ids.tolist() == [1, *given]
    assert made.unsent == given


def test_tokens_behind_the_end_are_dropped() -> None:
    stopped, full = running(max_new_tokens=20), running(max_new_tokens=2)
    assert (stopped.commit([8, 3, 9]), stopped.ids.tolist()) == (Finish(reason="stop", matched=3), [1, 8, 3])
    assert (full.commit([8, 9, 3]), full.ids.tolist()) == (Finish(reason="length"), [1, 8, 9])
