"""The scheduler against a worker whose tokens show every mistake of the host."""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from fake_worker import FakeWorker, alone, logprob
from runtime.batch import ForwardMode, ScheduleBatch, WorkerLimits
from runtime.config.runtime_config import RuntimeConfig
from runtime.managers.messages import (
    AbortReq,
    ControlReply,
    ControlReq,
    DrainReq,
    GenerateReq,
    Heartbeat,
    RequestInfo,
    StopReq,
    TokensOut,
    TokensOutBatch,
)
from runtime.managers.scheduler import Scheduler
from runtime.sampling_params import SamplingParams
from unit.tiny import tiny_runtime

EOS = (3,)


def config_of(**changed: Any) -> RuntimeConfig:
    """A configuration whose prompt steps hold one chunk, unless the test says otherwise."""
    options = {"max_prefill_tokens": max(changed.get("chunked_prefill_size", 64), 1), **changed}
    return tiny_runtime(**{"max_queued_requests": 1000, "watchdog_timeout": 60.0, **options})


def limits_of(**changed: Any) -> WorkerLimits:
    fields: dict[str, Any] = {
        "max_total_tokens": 512,
        "max_running_requests": 8,
        "max_context_len": 128,
        "max_extend_tokens": 256,
        "page_size": 1,
        "vocab_size": 40,
    }
    return WorkerLimits(**{**fields, **changed})


class House:
    """A scheduler, its fake worker, and all that was sent."""

    def __init__(self, limits: WorkerLimits, **settings: Any) -> None:
        self.now = 0.0
        self.limits = limits
        self.worker = FakeWorker(limits)
        self.inbox: list[Any] = []
        self.sent: list[Any] = []
        self.scheduler = Scheduler(
            config_of(**settings),
            self.worker,
            EOS,
            receive=lambda wait: self.inbox.pop(0) if self.inbox else None,
            send=self.sent.append,
            clock=lambda: self.now,
        )

    def ask(self, rid: str, prompt: list[int], seed: int = 0, stream: bool = True, **fields: Any) -> GenerateReq:
        own = {k: fields.pop(k) for k in ("top_logprobs", "prompt_logprobs", "priority", "cache_salt") if k in fields}
        req = GenerateReq(rid=rid, input_ids=prompt, sampling=SamplingParams(**fields), seed=seed, stream=stream, **own)
        self.inbox.append(req)
        return req

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.01
            self.scheduler.step()
            self.scheduler.ledger.check()

    def settle(self, most: int = 5000) -> None:
        for _ in range(most):
            self.step()
            if self.scheduler.idle and not self.inbox:
                return
        raise AssertionError("the scheduler does not come to rest")

    def outs(self, rid: str) -> list[TokensOut]:
        return [out for m in self.sent if isinstance(m, TokensOutBatch) for out in m.outs if out.rid == rid]

    def tokens(self, rid: str) -> list[int]:
        return [token for out in self.outs(rid) for token in out.token_ids]

    def finish(self, rid: str) -> Any:
        ends = [out.finish for out in self.outs(rid) if out.finish is not None]
        assert len(ends) == 1, f"{rid} ended {len(ends)} times"
        assert self.outs(rid)[-1].finish is ends[0]
        return ends[0]

    def expected(self, req: GenerateReq) -> list[int]:
        return alone(req.input_ids, req.sampling, req.seed, EOS, self.limits)

    def check_answer(self, req: GenerateReq) -> None:
        assert self.tokens(req.rid) == self.expected(req), req.rid
        finish = self.finish(req.rid)
        last = self.outs(req.rid)[-1]
        assert (last.prompt_tokens, last.completion_tokens) == (len(req.input_ids), len(self.expected(req)))
        stops = set(req.sampling.stop_token_ids) | (set() if req.sampling.ignore_eos else set(EOS))
        by_stop = self.expected(req)[-1] in stops and last.completion_tokens > req.sampling.min_new_tokens
        assert (finish.reason, finish.matched) == (("stop", self.tokens(req.rid)[-1]) if by_stop else ("length", None))

    def check_empty(self) -> None:
        """Nothing is held, and after a flush nothing is kept."""
        scheduler = self.scheduler
        assert scheduler.idle
        assert not scheduler.queue
        assert not scheduler.running
        assert sorted(scheduler._free_rows) == list(range(1, self.limits.max_running_requests + 1))
        ledger = scheduler.ledger
        assert ledger.own_pages == 0
        assert ledger.used == 0
        ledger.flush()
        ledger.check()
        assert ledger.allocator.available == ledger.num_pages


# ---- storms


def storm_limits(rng: random.Random) -> WorkerLimits:
    page_size, accept = rng.choice([1, 1, 4, 16]), rng.choice([1, 1, 2, 3, 4])
    tight = rng.random() < 0.6
    return limits_of(
        page_size=page_size,
        max_total_tokens=16 * (rng.randint(7, 14) if tight else 60),
        max_context_len=80,
        max_running_requests=rng.choice([1, 3, 8]),
        max_extend_tokens=rng.choice([16, 48, 200]),
        max_accept_len=accept,
        tokens_per_step=1 if accept == 1 else accept + rng.choice([0, 2]),
        prefix_lookahead=int(accept > 1 and rng.random() < 0.8),
        overlap=rng.random() < 0.7,
        mixed=rng.random() < 0.6,
        busy_tokens=rng.choice([0, 6, 30]),
    )


def storm_prompts(rng: random.Random) -> Iterator[list[int]]:
    stems = [[rng.randrange(40) for _ in range(rng.randint(1, 70))] for _ in range(3)]
    while True:
        stem = rng.choice(stems)
        yield stem[: rng.randint(1, len(stem))] + [rng.randrange(40) for _ in range(rng.choice([0, 1, 5]))]


@pytest.mark.parametrize("seed", range(120))
def test_a_storm_gives_everyone_the_answer_it_gets_alone_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    house = House(
        storm_limits(rng),
        chunked_prefill_size=rng.choice([-1, 5, 16, 64]),
        schedule_policy=rng.choice(["fcfs", "lpm"]),
        schedule_conservativeness=rng.choice([0.0, 0.3, 1.0]),
        radix_cache=rng.random() < 0.8,
        overlap=rng.random() < 0.8,
        stream_interval=rng.choice([1, 3]),
    )
    prompts, asked, gone = storm_prompts(rng), [], set()
    for i in range(24):
        fields: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 8, 30, 500]), "ignore_eos": rng.random() < 0.4}
        if rng.random() < 0.2:
            fields["stop_token_ids"] = (rng.randrange(40),)
        if rng.random() < 0.2:
            fields["min_new_tokens"] = min(5, fields["max_new_tokens"])
        if rng.random() < 0.2:
            fields["stop"] = ("x",)
        fields |= {"cache_salt": rng.choice(["", "", "other"]), "priority": rng.choice([0, 0, 1])}
        asked.append(house.ask(f"r{i}", next(prompts), rng.randrange(3), rng.random() < 0.6, **fields))
        house.step(rng.choice([0, 0, 1, 4]))
        if rng.random() < 0.25:
            victim = f"r{rng.randrange(i + 1)}"
            gone.add(victim)
            house.inbox.append(rng.choice([AbortReq(rid=victim), StopReq(rid=victim)]))
    house.settle()
    for req in asked:
        if req.rid not in gone:
            house.check_answer(req)
        else:
            want, got = house.expected(req), house.tokens(req.rid)
            assert got == want[: len(got)]
            assert sum(out.finish is not None for out in house.outs(req.rid)) <= 1
    house.check_empty()
    assert house.worker.most_unread <= (1 if house.limits.overlap and house.scheduler._overlap else 0)


@pytest.mark.parametrize("mixed", [False, True])
def test_storms_reach_what_they_are_meant_to_reach(mixed: bool) -> None:
    """Retraction, prefix hits, chunks and a step in flight while memory runs out all happen with these settings; mixed steps too."""
    limits = limits_of(max_total_tokens=96, max_accept_len=3, tokens_per_step=4, prefix_lookahead=1, mixed=mixed)
    house = House(limits, schedule_conservativeness=0.0)
    stem = list(range(10, 30))
    asked = [house.ask(f"r{i}", [*stem, i], max_new_tokens=40, ignore_eos=True) for i in range(6)]
    house.settle()
    for req in asked:
        house.check_answer(req)
    state = house.scheduler.state
    assert state.num_retracted_requests_total > 0
    assert state.cached_tokens_total > 0
    assert (state.mixed_steps > 0) == mixed
    house.check_empty()


# ---- prompts and decoding in one step


def steps_of(house: House) -> list[tuple[int, int]]:
    """(prompt tokens, requests that decode) of every step so far."""
    return [(len(b.token_ids), b.num_decodes) for b in house.worker.batches]


def test_running_requests_decode_beside_every_chunk_of_a_long_prompt() -> None:
    house = House(limits_of(mixed=True), chunked_prefill_size=9)
    short = house.ask("short", [1, 2], max_new_tokens=60, ignore_eos=True)
    house.step(3)
    long = house.ask("long", list(range(30)) * 2, max_new_tokens=20, ignore_eos=True)
    house.settle()
    steps = steps_of(house)
    first = steps.index((8, 1))
    assert steps[:first] == [(2, 0), *[(0, 1)] * (first - 1)]
    assert steps[first : first + 8] == [*[(8, 1)] * 7, (4, 1)], "one token of the chunk is the other's"
    assert steps[first + 8] == (0, 2), "who has just read its prompt decodes from the next step on"
    for req in (short, long):
        house.check_answer(req)
    state = house.scheduler.state
    assert (state.extend_steps, state.mixed_steps, state.extend_steps + state.decode.steps) == (9, 8, len(steps))
    house.check_empty()


def test_nobody_rides_in_a_prompt_that_is_too_short_to_be_worth_it() -> None:
    house = House(limits_of(mixed=True, mixed_from=8), chunked_prefill_size=9)
    house.ask("runs", [1, 2], max_new_tokens=60, ignore_eos=True)
    house.step(3)
    house.ask("short", list(range(7)), max_new_tokens=4, ignore_eos=True)
    house.settle()
    assert (7, 0) in steps_of(house)
    house.ask("runs too", [1, 2], max_new_tokens=60, ignore_eos=True)
    house.step(3)
    house.ask("long", list(range(20, 28)), max_new_tokens=4, ignore_eos=True)
    house.settle()
    assert (8, 1) in steps_of(house)
    house.check_empty()


def test_what_decodes_along_is_off_the_chunk_and_leaves_prompts_at_least_half_of_it() -> None:
    """Windows of 4 tokens and chunks of 32: four requests may come along, five decode between two prompt steps as without mixing."""
    for running in range(1, 7):
        house = House(limits_of(mixed=True, max_accept_len=3, tokens_per_step=4, max_total_tokens=2048), chunked_prefill_size=32)
        asked = [house.ask(f"r{i}", [i], max_new_tokens=100, ignore_eos=True) for i in range(running)]
        house.step(3)
        asked.append(house.ask("long", [39, *range(20)] * 5, max_new_tokens=2, ignore_eos=True))
        house.settle()
        prompts = [step for step in steps_of(house)[1:] if step[0]]
        if running <= 4:
            assert prompts[0] == (32 - 4 * running, running)
            assert all(tokens + 4 * riders <= 32 and riders for tokens, riders in prompts)
        else:
            assert prompts == [(32, 0), (32, 0), (32, 0), (9, 0)]
        for req in asked:
            house.check_answer(req)


def test_prompts_that_must_not_be_cut_go_alone() -> None:
    house = House(limits_of(mixed=True, max_extend_tokens=40), chunked_prefill_size=-1, max_prefill_tokens=100)
    for i in range(4):
        house.ask(f"r{i}", [i] * 40, max_new_tokens=9, ignore_eos=True)
        house.step(2)
    house.settle()
    assert house.scheduler.state.mixed_steps == house.scheduler.state.num_failed_steps_total == 0
    assert [tokens for tokens, _ in steps_of(house) if tokens] == [40] * 4


def test_a_worker_that_does_not_mix_is_given_no_mixed_step() -> None:
    house = House(limits_of(), chunked_prefill_size=8)
    for i in range(6):
        house.ask(f"r{i}", [i] * 20, max_new_tokens=9, ignore_eos=True)
        house.step(2)
    house.settle()
    assert not any(batch.num_prompts and batch.num_decodes for batch in house.worker.batches)


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_is_retracted_to_decode_beside_a_prompt(overlap: bool) -> None:
    """A prompt takes nearly all pages when it is admitted. Who decodes beside its chunks soon has none left, and lets the rest go alone."""
    limits = limits_of(mixed=True, max_total_tokens=32, overlap=overlap)
    house = House(limits, schedule_conservativeness=0.0, chunked_prefill_size=4, max_prefill_tokens=64)
    first = house.ask("first", [1, 2], max_new_tokens=24, ignore_eos=True)
    house.step(8)
    second = house.ask("second", [7] * (32 - house.scheduler.ledger.used - 4), max_new_tokens=2, ignore_eos=True)
    while sum(tokens for tokens, _ in steps_of(house)[1:]) < len(second.input_ids):
        house.step()
        assert house.scheduler.state.num_retracted_requests_total == 0
    riding = [riders for tokens, riders in steps_of(house)[1:] if tokens]
    assert 0 < sum(riding) < len(riding), "some chunks with the other request, then some without"
    assert riding == sorted(riding, reverse=True)
    house.settle()
    for req in (first, second):
        house.check_answer(req)
    house.check_empty()


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
def test_a_failed_mixed_step_answers_its_prompts_and_those_who_decode(where: str) -> None:
    house = House(limits_of(mixed=True), chunked_prefill_size=16, max_prefill_tokens=16)

    def fail(batch: ScheduleBatch) -> None:
        if batch.num_prompts and batch.num_decodes == 2:
            raise Injected

    setattr(house.worker, where, fail)
    decoding = [house.ask(f"d{i}", [i] * 3, max_new_tokens=50, ignore_eos=True) for i in range(2)]
    house.step(4)
    house.ask("prompt", [9] * 40, max_new_tokens=3, ignore_eos=True)
    house.settle()
    assert [house.finish(rid).status for rid in ("d0", "d1", "prompt")] == [500] * 3
    assert house.scheduler.state.num_failed_steps_total >= 1
    house.check_empty()
    setattr(house.worker, where, lambda batch: None)
    again = house.ask("again", decoding[0].input_ids, max_new_tokens=5, ignore_eos=True)
    house.settle()
    house.check_answer(again)


def test_logprobs_of_both_parts_of_a_mixed_step_follow_their_tokens() -> None:
    house = House(limits_of(mixed=True, max_accept_len=3, tokens_per_step=3), chunked_prefill_size=12)
    asked = []
    for i in range(4):
        prompt = [i + t for t in range(3 + 9 * i)]
        asked.append(house.ask(f"r{i}", prompt, i, max_new_tokens=25, ignore_eos=True, top_logprobs=i - 1, prompt_logprobs=i > 0))
        house.step(3)
    house.settle()
    assert house.scheduler.state.mixed_steps > 4
    for i, ask in enumerate(asked):
        house.check_answer(ask)
        ids, n = ask.input_ids + house.tokens(ask.rid), len(ask.input_ids)
        got = [out.logprobs for out in house.outs(ask.rid)]
        chosen = [c for part in got if part for c in part.chosen]
        assert chosen == ([logprob(ids[:at], 0) for at in range(n, len(ids))] if i else [])
        if i:
            (prompts,) = [out.prompt_logprobs for out in house.outs(ask.rid) if out.prompt_logprobs]
            assert prompts.chosen == [None] + [logprob(ids[:at], 0) for at in range(1, n)]


# ---- overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_submits_the_next_step_before_reading_the_last(overlap: bool) -> None:
    house = House(limits_of(), overlap=overlap)
    house.ask("a", [5, 6], max_new_tokens=10, ignore_eos=True)
    house.settle()
    assert house.worker.most_unread == int(overlap)


def test_a_request_known_to_end_by_length_is_not_scheduled_again() -> None:
    house = House(limits_of())
    house.ask("a", [5, 6], max_new_tokens=4, ignore_eos=True)
    house.settle()
    assert [b.mode for b in house.worker.batches] == [ForwardMode.EXTEND] + [ForwardMode.DECODE] * 3


def test_accepted_tokens_after_the_first_ending_are_dropped() -> None:
    house = House(limits_of(max_accept_len=4, tokens_per_step=5, prefix_lookahead=1))
    asked = [house.ask(f"r{n}", [n, 8, 9], max_new_tokens=n, ignore_eos=True) for n in range(1, 12)]
    house.settle()
    for req in asked:
        house.check_answer(req)
    house.check_empty()


# ---- the policy at work


def test_running_requests_decode_between_the_chunks_of_a_long_prompt() -> None:
    house = House(limits_of(), chunked_prefill_size=8)
    house.ask("short", [1, 2], max_new_tokens=60, ignore_eos=True)
    house.step(3)
    house.ask("long", list(range(30)) * 2, max_new_tokens=2, ignore_eos=True)
    house.settle()
    modes = [b.mode for b in house.worker.batches]
    first, last = 1 + modes[1:].index(ForwardMode.EXTEND), len(modes) - 1 - modes[::-1].index(ForwardMode.EXTEND)
    window = modes[first : last + 1]
    assert window.count(ForwardMode.EXTEND) == 8
    assert all(mode != after for mode, after in pairwise(window))


def test_as_many_prompt_tokens_as_allowed_run_between_two_decode_steps() -> None:
    house = House(limits_of(), chunked_prefill_size=8, max_prefill_tokens=24)
    house.ask("short", [1, 2], max_new_tokens=60, ignore_eos=True)
    house.step(3)
    house.ask("long", list(range(30)) * 2, max_new_tokens=2, ignore_eos=True)
    house.settle()
    modes = "".join("e" if b.mode is ForwardMode.EXTEND else "d" for b in house.worker.batches)
    assert max(len(run) for run in modes[1:].split("d")) == 3
    house.check_empty()


def test_several_prompts_share_one_extend_batch_within_its_budget() -> None:
    house = House(limits_of(max_extend_tokens=20))
    for i in range(4):
        house.ask(f"r{i}", [i] * 8, max_new_tokens=1)
    house.settle()
    assert [b.extend_lens.tolist() for b in house.worker.batches] == [[8, 8, 4], [4, 8]]


def test_few_prompts_that_keep_the_device_busy_go_one_after_the_other() -> None:
    def steps(prompts: int, **asked: Any) -> list[list[int]]:
        house = House(limits_of(max_extend_tokens=20, max_running_requests=16, busy_tokens=7), **asked)
        for i in range(prompts):
            house.ask(f"r{i}", [i] * (8 if i else 4), max_new_tokens=1)
        house.settle()
        return [b.extend_lens.tolist() for b in house.worker.batches]

    assert steps(4) == [[4, 8], [8], [8]], "a short prompt leaves room for another; a long one does not"
    assert steps(9)[:2] == [
        [4, 8, 8],
        [8],
    ], "of many the first share a step, the last eight do not"
    assert steps(3, chunked_prefill_size=6) == [[4, 2], [6], [6], [2]]


def test_those_who_might_decode_along_do_not_keep_short_prompts_from_sharing_a_step() -> None:
    house = House(limits_of(mixed=True, mixed_from=20, tokens_per_step=4, busy_tokens=7), chunked_prefill_size=64)
    for rid in ("a", "b"):
        house.ask(rid, [1, 2, 3], max_new_tokens=30, ignore_eos=True)
    house.step(6)
    before = len(house.worker.batches)
    for i in range(3):
        house.ask(f"r{i}", [10 + i, 4], max_new_tokens=1)
    house.settle()
    assert [b.extend_lens.tolist() for b in house.worker.batches[before:] if len(b.extend_lens)] == [[2, 2, 2]]
    assert house.scheduler.state.mixed_steps == 0, "prompts so short take nobody along"


def test_without_chunking_a_prompt_is_prefilled_whole_unless_the_worker_cannot() -> None:
    house = House(limits_of(max_extend_tokens=20), chunked_prefill_size=-1)
    for i, size in enumerate([12, 12, 50]):
        house.ask(f"r{i}", [i] * size, max_new_tokens=1)
    house.settle()
    assert [b.extend_lens.tolist() for b in house.worker.batches] == [[12], [12], [20], [20], [10]]


def test_a_prompt_waits_for_its_twin_and_then_reuses_it() -> None:
    house = House(limits_of())
    prompt = [7, 8] * 30
    twins = [house.ask(f"r{i}", prompt, max_new_tokens=3) for i in range(4)]
    house.settle()
    for req in twins:
        house.check_answer(req)
    assert [house.outs(f"r{i}")[-1].cached_tokens for i in range(4)] == [0, 59, 59, 59]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("shared", "together"), [(48, 2), (64, 2), (65, 1), (100, 1)])
def test_a_prompt_waits_for_no_twin_whose_pages_it_cannot_reuse(shared: int, together: int, lookahead: int) -> None:
    shared -= 1 - lookahead  # where pages need not know the token after them, one shared token less is enough
    house = House(limits_of(page_size=64, max_total_tokens=1024, prefix_lookahead=lookahead), chunked_prefill_size=256)
    twins = [house.ask(f"r{i}", [*[7] * shared, 10 + i, 4, 5], max_new_tokens=1) for i in range(2)]
    house.settle()
    for req in twins:
        house.check_answer(req)
    assert [len(b.extend_lens) for b in house.worker.batches] == [together] * (2 // together)
    assert house.outs("r1")[-1].cached_tokens == (0 if together == 2 else 64)


def test_prompts_with_different_salts_share_nothing() -> None:
    house = House(limits_of())
    for salt in ("a", "b"):
        house.ask(salt, [7, 8] * 30, max_new_tokens=1, cache_salt=salt)
        house.settle()
    assert [house.outs(salt)[-1].cached_tokens for salt in ("a", "b")] == [0, 0]


def test_lookahead_reuses_one_token_less_where_prompts_part() -> None:
    for lookahead, cached in ((0, 10), (1, 9)):
        house = House(limits_of(prefix_lookahead=lookahead))
        house.ask("a", [*range(10, 20), 1, 1], max_new_tokens=1)
        house.settle()
        b = house.ask("b", [*range(10, 20), 2, 2], max_new_tokens=5)
        house.settle()
        house.check_answer(b)
        assert house.outs("b")[-1].cached_tokens == cached


def test_a_higher_priority_starts_first() -> None:
    house = House(limits_of(max_running_requests=1))
    house.ask("low", [1], max_new_tokens=2, ignore_eos=True)
    house.ask("high", [2], max_new_tokens=2, ignore_eos=True, priority=5)
    house.settle()
    ended = [out.rid for m in house.sent if isinstance(m, TokensOutBatch) for out in m.outs if out.finish]
    assert ended == ["high", "low"]


def test_the_youngest_is_retracted_and_the_oldest_never() -> None:
    house = House(limits_of(max_total_tokens=64), schedule_conservativeness=0.0)
    asked = [house.ask(f"r{i}", [i] * 6, max_new_tokens=50, ignore_eos=True) for i in range(4)]
    house.settle()
    assert house.scheduler.state.num_retracted_requests_total > 0
    ended = [out.rid for m in house.sent if isinstance(m, TokensOutBatch) for out in m.outs if out.finish]
    assert ended == ["r0", "r1", "r2", "r3"]
    for req in asked:
        house.check_answer(req)


def test_a_retracted_request_goes_before_those_that_wait() -> None:
    house = House(limits_of(max_total_tokens=64, max_running_requests=2), schedule_conservativeness=0.0)
    asked = [house.ask(f"r{i}", [i] * 6, max_new_tokens=50, ignore_eos=True) for i in range(4)]
    while house.scheduler.state.num_retracted_requests_total == 0:
        house.step()
    waiting = [req.rid for req in house.scheduler.queue]
    house.settle()
    assert waiting == ["r1", "r2", "r3"]
    for req in asked:
        house.check_answer(req)


def test_prompt_logprobs_are_whole_after_a_retraction_between_chunks() -> None:
    house = House(limits_of(max_total_tokens=64), chunked_prefill_size=4, schedule_conservativeness=0.0)
    old = house.ask("old", [9] * 6, max_new_tokens=50, ignore_eos=True)
    house.step(20)
    ask = house.ask("a", list(range(35)), max_new_tokens=3, ignore_eos=True, top_logprobs=0, prompt_logprobs=True)
    house.settle()
    assert house.scheduler.state.num_retracted_requests_total == 1
    for req in (old, ask):
        house.check_answer(req)
    prompts = [out.prompt_logprobs for out in house.outs("a") if out.prompt_logprobs]
    assert [p.chosen for p in prompts] == [[None] + [logprob(range(i), 0) for i in range(1, 35)]]


def test_a_conservative_server_retracts_nobody() -> None:
    house = House(limits_of(max_total_tokens=64), schedule_conservativeness=2.0)
    for i in range(4):
        house.ask(f"r{i}", [i] * 6, max_new_tokens=50, ignore_eos=True)
    house.settle()
    assert house.scheduler.state.num_retracted_requests_total == 0


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "fields", "status", "words"),
    [
        ([], {}, 400, "at least one token"),
        ([1, 40], {}, 400, "from 0 to 39"),
        ([1, -1], {}, 400, "from 0 to 39"),
        ([1, 1 << 62], {}, 400, "from 0 to 39"),
        ([1] * 128, {}, 400, "the most is 127"),
        ([1] * 60, {"max_new_tokens": 10}, 400, "69 KV slots and the server has 64"),
        ([1], {"temperature": float("nan")}, 400, "temperature"),
        ([1], {"top_logprobs": 21}, 400, "top_logprobs"),
    ],
)
def test_a_request_that_can_never_run_is_told_why(prompt: list[int], fields: dict[str, Any], status: int, words: str) -> None:
    house = House(limits_of(max_total_tokens=64))
    house.ask("bad", prompt, **fields)
    house.settle()
    finish = house.finish("bad")
    assert (finish.reason, finish.status) == ("abort", status)
    assert words in finish.message
    assert house.worker.batches == []
    house.check_empty()


def test_a_request_that_just_fits_runs() -> None:
    house = House(limits_of(max_total_tokens=64, max_accept_len=3, tokens_per_step=4), radix_cache=True)
    req = house.ask("a", [1] * 52, max_new_tokens=10, ignore_eos=True)
    house.settle()
    house.check_answer(req)
    house.ask("b", [1] * 52, max_new_tokens=11, ignore_eos=True)
    house.settle()
    assert house.finish("b").status == 400


def test_output_beyond_the_context_ends_by_length_there() -> None:
    house = House(limits_of())
    req = house.ask("a", [1] * 120, max_new_tokens=1 << 31, ignore_eos=True)
    house.settle()
    house.check_answer(req)
    assert len(house.tokens("a")) == 8


def test_more_waiting_requests_than_allowed_are_sent_away() -> None:
    house = House(limits_of(max_running_requests=1), max_queued_requests=2)
    for i in range(4):
        house.ask(f"r{i}", [i], max_new_tokens=3, ignore_eos=True)
    house.settle()
    assert [house.finish(f"r{i}").status for i in range(4)] == [0, 0, 0, 429], "one has the row, two may wait"


def test_nobody_is_sent_away_while_there_are_rows_for_all_who_came_at_once() -> None:
    house = House(limits_of(max_running_requests=8), max_queued_requests=1)
    for i in range(10):
        house.ask(f"r{i}", [i], max_new_tokens=3, ignore_eos=True)
    house.settle()
    assert [house.finish(f"r{i}").status for i in range(10)] == [0] * 9 + [429]


def test_a_second_request_of_the_same_name_does_not_disturb_the_first(caplog: pytest.LogCaptureFixture) -> None:
    house = House(limits_of())
    req = house.ask("a", [1, 2], max_new_tokens=5)
    house.ask("a", [3], max_new_tokens=5)
    with caplog.at_level(logging.ERROR):
        house.settle()
    house.check_answer(req)
    assert "second request" in caplog.text


# ---- ends from outside


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_frees_everything_within_one_step_wherever_the_request_is(steps: int) -> None:
    house = House(limits_of(max_running_requests=1), chunked_prefill_size=10)
    for rid in ("a", "b"):
        house.ask(rid, list(range(35)), max_new_tokens=50, ignore_eos=True)
    house.step(steps)
    house.inbox.append(AbortReq(rid="b"))
    house.inbox.append(AbortReq(rid="a"))
    house.step()
    assert house.scheduler.ledger.used == 0
    assert [house.finish(rid).reason for rid in ("a", "b")] == ["abort", "abort"]
    house.settle()
    house.check_empty()


def test_abort_all_ends_every_request_once() -> None:
    house = House(limits_of(max_running_requests=2))
    for i in range(5):
        house.ask(f"r{i}", [i], max_new_tokens=50, ignore_eos=True)
    house.step(3)
    house.inbox += [AbortReq(all=True), AbortReq(rid="r0"), AbortReq(rid="unknown")]
    house.settle()
    assert [house.finish(f"r{i}").reason for i in range(5)] == ["abort"] * 5
    assert house.scheduler.state.num_aborted_requests_total == 5
    house.check_empty()


def test_a_stop_owes_no_reply_and_its_prefix_stays_cached() -> None:
    house = House(limits_of())
    house.ask("a", list(range(20)), max_new_tokens=50, ignore_eos=True, stop=("x",))
    house.step(6)
    told = len(house.outs("a"))
    house.inbox.append(StopReq(rid="a"))
    house.settle()
    assert len(house.outs("a")) == told
    assert all(out.finish is None for out in house.outs("a"))
    house.ask("b", list(range(20)), max_new_tokens=1)
    house.settle()
    assert house.outs("b")[-1].cached_tokens == 19
    house.check_empty()


# ---- failures


class Injected(RuntimeError):
    """A failure made by a test."""


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
@pytest.mark.parametrize("seed", range(12))
def test_a_failed_step_fails_its_requests_only_and_leaks_nothing(where: str, seed: int) -> None:
    rng = random.Random(seed)
    house = House(limits_of(page_size=rng.choice([1, 4]), max_running_requests=3), chunked_prefill_size=8)
    broken: set[int] = set()
    doomed = rng.sample(range(2, 40), 2)

    def fail(batch: ScheduleBatch) -> None:
        if batch.step in doomed:
            broken.add(batch.step)
            raise Injected

    setattr(house.worker, where, fail)
    asked = [
        house.ask(f"r{i}", [rng.randrange(40) for _ in range(rng.randint(1, 20))], i, max_new_tokens=9, ignore_eos=True) for i in range(9)
    ]
    house.settle()
    assert broken
    lost = [req for req in asked if house.finish(req.rid).reason == "abort"]
    assert 0 < len(lost) < len(asked)
    for req in asked:
        if req in lost:
            assert house.finish(req.rid).status == 500
        else:
            house.check_answer(req)
    house.check_empty()


def test_a_hundred_failures_far_apart_leak_nothing() -> None:
    house = House(limits_of(page_size=4))
    house.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected()) if batch.mode is ForwardMode.DECODE else None
    for i in range(100):
        house.now += 31.0
        house.ask(f"r{i}", [i % 40] * 9, max_new_tokens=1 + i % 2 * 20, ignore_eos=True)
        house.inbox.append(AbortReq(rid="nobody"))
        house.settle()
    assert house.scheduler.state.num_failed_steps_total >= 50
    house.check_empty()


def test_kv_of_a_failed_step_is_not_reused() -> None:
    house = House(limits_of())
    house.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected()) if batch.step == 1 else None
    house.ask("a", list(range(20)), max_new_tokens=5)
    house.settle()
    assert house.finish("a").status == 500
    assert house.scheduler.ledger.cache.total_pages == 0


def test_what_a_request_wrote_before_its_failure_is_not_kept_either() -> None:
    house = House(limits_of())
    house.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected()) if batch.step == 9 else None
    house.ask("a", list(range(20)), max_new_tokens=50, ignore_eos=True)
    house.settle()
    assert house.finish("a").status == 500
    assert house.scheduler.ledger.cache.total_pages == 20  # the prompt, which was published when it was sound


def test_an_abort_keeps_no_kv_of_a_step_that_nobody_read() -> None:
    """It may still fail."""
    house = House(limits_of(), chunked_prefill_size=8)
    house.ask("a", list(range(20)), max_new_tokens=5)
    house.scheduler.step()
    house.scheduler.step()  # the first chunk is read, the second in flight
    house.inbox.append(AbortReq(rid="a"))
    house.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected())
    house.settle()
    assert house.scheduler.ledger.cache.total_pages == 8


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
def test_three_failures_within_a_minute_end_the_process_after_everyone_was_told(where: str) -> None:
    house = House(limits_of())
    setattr(house.worker, where, lambda batch: (_ for _ in ()).throw(Injected()))
    for i in range(3):
        house.ask(f"r{i}", [i], max_new_tokens=1)
        if i < 2:
            house.settle()
    with pytest.raises(RuntimeError, match="3 steps failed") as raised:
        house.settle()
    assert isinstance(raised.value.__cause__, Injected)
    assert [house.finish(f"r{i}").status for i in range(3)] == [500, 500, 500]


# ---- what is told


def test_request_info_comes_before_the_first_tokens() -> None:
    house = House(limits_of())
    house.ask("a", [1], max_new_tokens=1, stop=("x",))
    house.ask("bad", [], max_new_tokens=1)
    house.settle()
    for rid in ("a", "bad"):
        info = next(i for i, m in enumerate(house.sent) if isinstance(m, RequestInfo) and m.rid == rid)
        first = next(i for i, m in enumerate(house.sent) if isinstance(m, TokensOutBatch) and any(o.rid == rid for o in m.outs))
        assert info < first


@pytest.mark.parametrize(
    ("stream", "stop", "interval", "sizes"),
    [(True, (), 1, [1] * 7), (True, (), 3, [1, 3, 3]), (False, (), 1, [7]), (False, ("x",), 3, [1] * 7)],
)
def test_tokens_go_out_as_often_as_their_reader_needs(stream: bool, stop: tuple[str, ...], interval: int, sizes: list[int]) -> None:
    house = House(limits_of(), stream_interval=interval)
    house.ask("a", [1], stream=stream, max_new_tokens=7, ignore_eos=True, stop=stop)
    house.settle()
    assert [len(out.token_ids) for out in house.outs("a")] == sizes


@pytest.mark.parametrize("most", [10, 11, 12, 13])
def test_logprobs_follow_their_tokens(most: int) -> None:
    house = House(limits_of(max_accept_len=3, tokens_per_step=3), stream_interval=4, chunked_prefill_size=3)
    plain = house.ask("plain", [4, 5], max_new_tokens=11, ignore_eos=True)
    req = house.ask("a", [1, 2, 3, 4, 5, 6, 7], max_new_tokens=most, ignore_eos=True, top_logprobs=1, prompt_logprobs=True)
    again = house.ask("b", [1, 2, 3, 4, 5, 6, 7], max_new_tokens=4, ignore_eos=True, top_logprobs=2, prompt_logprobs=True, stream=False)
    house.settle()
    assert all(out.logprobs is None for out in house.outs("plain"))
    house.check_answer(plain)
    for ask, k in ((req, 1), (again, 2)):
        house.check_answer(ask)
        ids = ask.input_ids + house.tokens(ask.rid)
        got = [out.logprobs for out in house.outs(ask.rid)]
        chosen = [c for part in got if part for c in part.chosen]
        assert chosen == [logprob(ids[:i], 0) for i in range(7, len(ids))]
        assert all(len(top) == k for part in got if part for top in part.top)
        prompts = [out.prompt_logprobs for out in house.outs(ask.rid) if out.prompt_logprobs]
        assert len(prompts) == 1
        assert prompts[0].chosen == [None] + [logprob(ids[:i], 0) for i in range(1, 7)]
        assert prompts[0].top == [[]] + [[(r, logprob(ids[:i], r)) for r in range(k)] for i in range(1, 7)]


def test_speculation_is_counted_by_position() -> None:
    house = House(limits_of(max_accept_len=4, tokens_per_step=4))
    house.ask("a", [1, 2], max_new_tokens=30, ignore_eos=True)
    house.settle()
    spec = house.outs("a")[-1].spec
    assert spec is not None
    assert spec.draft_tokens == 3 * spec.verify_steps
    assert sum(spec.accepted_by_position) == spec.accepted_tokens
    assert spec.accepted_by_position == sorted(spec.accepted_by_position, reverse=True)
    assert 30 <= 1 + spec.verify_steps + spec.accepted_tokens < 34
    total = house.scheduler.state.spec
    assert (total.verify_steps, total.accepted_by_position) == (spec.verify_steps, spec.accepted_by_position)


def control(house: House, what: Any, folder: str = "") -> ControlReply:
    house.inbox.append(ControlReq(call_id=f"c{len(house.sent)}", what=what, folder=folder))
    house.step()
    return next(m for m in reversed(house.sent) if isinstance(m, ControlReply))


def test_the_state_names_every_figure() -> None:
    house = House(limits_of())
    for i in range(3):
        house.ask(f"r{i}", [i, 5, 6], max_new_tokens=5, ignore_eos=True)
    house.settle()
    house.ask("r3", [0, 5, 6], max_new_tokens=5, ignore_eos=True)
    house.step(2)
    state = json.loads(control(house, "state").body)
    assert state["worker"]["kind"] == "fake"
    assert state["startup_seconds"] == {"load": 1.5}
    assert (state["num_running_reqs"], state["num_queue_reqs"], state["num_requests_total"]) == (1, 0, 4)
    assert (state["prompt_tokens_total"], state["cached_tokens_total"], state["cache_hit_rate"]) == (12, 2, 2 / 12)
    assert 0 < state["token_usage"] < 0.1
    assert state["padded_rows_total"] == state["decode_steps"] == state["graph_steps_total"] > state["eager_steps_total"] == 0
    house.settle()
    house.now += 2.0
    house.step()
    assert json.loads(house.scheduler.heartbeat().state)["generation_tokens_total"] == 20


def test_the_cache_is_flushed_only_when_nobody_runs() -> None:
    house = House(limits_of())
    house.ask("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    house.step(2)
    refused = control(house, "flush_cache")
    assert not refused.ok
    assert "1 requests are alive" in refused.error
    house.inbox.append(AbortReq(all=True))  # leaves a step in flight whose requests are all gone
    assert control(house, "flush_cache").ok
    assert house.scheduler.ledger.allocator.available == 512


def test_profiling_is_passed_to_the_worker_and_its_error_to_the_caller() -> None:
    house = House(limits_of())
    assert control(house, "start_profile", "/tmp/x").ok
    assert json.loads(control(house, "stop_profile").body) == {"file": "trace.json"}
    failed = control(house, "start_profile")
    assert (failed.ok, failed.error, failed.refused) == (False, "no folder", False)
    refused = control(house, "start_profile", "/running")
    assert (refused.ok, refused.error, refused.refused) == (False, "a profile is already running", True)


# ---- run()


def test_run_answers_beats_and_leaves_when_drained() -> None:
    limits = limits_of()
    inbox: queue.Queue[Any] = queue.Queue()
    sent: queue.Queue[Any] = queue.Queue()
    waits: list[float] = []

    def receive(wait: float) -> Any:
        waits.append(wait)
        try:
            return inbox.get(timeout=wait) if wait else inbox.get_nowait()
        except queue.Empty:
            return None

    scheduler = Scheduler(config_of(), FakeWorker(limits), EOS, receive, sent.put)
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    beats: list[Heartbeat] = []
    while len(beats) < 3:
        message = sent.get(timeout=10.0)
        assert isinstance(message, Heartbeat)
        beats.append(message)
    assert [b.count for b in beats] == [1, 2, 3]
    assert len(waits) < 50, "an idle loop must sleep"
    inbox.put(GenerateReq(rid="a", input_ids=[1, 2], sampling=SamplingParams(max_new_tokens=40, ignore_eos=True), seed=0))
    inbox.put(DrainReq())
    inbox.put(GenerateReq(rid="late", input_ids=[1, 2], sampling=SamplingParams(), seed=0))
    thread.join(timeout=10.0)
    assert not thread.is_alive()
    told = [sent.get_nowait() for _ in range(sent.qsize())]
    outs = {out.rid: out for m in told if isinstance(m, TokensOutBatch) for out in m.outs if out.finish}
    assert outs["a"].finish.reason == "length"
    assert outs["late"].finish.status == 503
    assert isinstance(told[-1], DrainReq)
