"""The scheduler against a worker whose tokens reveal every mistake of the host."""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from fake_worker import FakeWorker, alone, logprob, pooled
from runtime.batch import ScheduleBatch, WorkerLimits
from runtime.config.runtime_config import RuntimeConfig
from runtime.managers.messages import (
    AbortReq,
    CacheFlushed,
    CallFailed,
    ControlReply,
    ControlReq,
    DrainReq,
    GenerateReq,
    Heartbeat,
    ProfileAt,
    RequestInfo,
    StopReq,
    TokensOut,
    TokensOutBatch,
)
from runtime.managers.scheduler import Scheduler
from runtime.managers.telemetry.spec_stats import SpecStats
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams
from unit.tiny import tiny_runtime
from unit.wire import as_sent

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


class Harness:
    """A scheduler, its fake worker, and all messages sent."""

    def __init__(self, limits: WorkerLimits, **settings: Any) -> None:
        self.now = 0.0
        self.limits = limits
        self.worker = FakeWorker(limits)
        self.inbox: list[Any] = []
        self.sent: list[Any] = []
        config = config_of(**settings)
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            self.worker,
            EOS,
            receive=lambda wait: self.inbox.pop(0) if self.inbox else None,
            send=self._keep,
            clock=lambda: self.now,
        )

    def _keep(self, message: Any) -> None:
        self.sent.append(as_sent(message))

    def ask(self, rid: str, prompt: list[int], seed: int = 0, stream: bool = True, **fields: Any) -> GenerateReq:
        own = {k: fields.pop(k) for k in GenerateReq.__struct_fields__ if k in fields}
        req = GenerateReq(rid=rid, input_ids=prompt, sampling=SamplingParams(**fields), seed=seed, stream=stream, **own)
        self.inbox.append(req)
        return req

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.01
            self.scheduler.step()
            self.scheduler.groups.check()

    def run_until_idle(self, most: int = 5000) -> None:
        for _ in range(most):
            self.step()
            if self.scheduler.idle and not self.inbox:
                return
        raise AssertionError("the scheduler does not become idle")

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
        assert (last.progress.prompt_tokens, last.progress.completion_tokens) == (len(req.input_ids), len(self.expected(req)))
        stops = set(req.sampling.stop_token_ids) | (set() if req.sampling.ignore_eos else set(EOS))
        by_stop = self.expected(req)[-1] in stops and last.progress.completion_tokens > req.sampling.min_new_tokens
        assert (finish.reason, finish.matched) == (("stop", self.tokens(req.rid)[-1]) if by_stop else ("length", None))

    def check_empty(self) -> None:
        """No row or page is in use, and a flush frees all pages."""
        scheduler = self.scheduler
        assert scheduler.idle
        assert not scheduler.groups.only.queue
        assert scheduler.groups.only.queue.tokens == 0
        assert not scheduler.groups.only.running
        assert scheduler.groups.only.free_rows == self.limits.max_running_requests
        kv_pages = scheduler.groups.only.kv_pages
        assert kv_pages.own_pages == 0
        assert kv_pages.used == 0
        kv_pages.flush()
        kv_pages.check()
        assert kv_pages.allocator.available == kv_pages.num_pages


# ---- random workloads


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
        saturating_tokens=rng.choice([0, 6, 30]),
    )


def storm_prompts(rng: random.Random) -> Iterator[list[int]]:
    stems = [[rng.randrange(40) for _ in range(rng.randint(1, 70))] for _ in range(3)]
    while True:
        stem = rng.choice(stems)
        yield stem[: rng.randint(1, len(stem))] + [rng.randrange(40) for _ in range(rng.choice([0, 1, 5]))]


@pytest.mark.parametrize("seed", range(80))
def test_a_storm_answers_each_request_as_if_alone_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    limits, overlap = storm_limits(rng), rng.random() < 0.8
    harness = Harness(
        limits,
        **rng.choice(
            [{"chunked_prefill_size": size} for size in (-1, 5, 16, 64)] + [{"chunked_prefill_size": 5, "largest_chunk_size": 48}]
        ),
        schedule_policy=rng.choice(["fcfs", "lpm"]),
        schedule_conservativeness=rng.choice([0.0, 0.3, 1.0]),
        radix_cache=rng.random() < 0.8,
        overlap=overlap,
        stream_interval=rng.choice([1, 3]),
    )
    prompts, asked, gone = storm_prompts(rng), [], set()
    clients = "abcd" if seed % 2 else "a"
    for i in range(24):
        fields: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 8, 30, 500]), "ignore_eos": rng.random() < 0.4}
        if rng.random() < 0.2:
            fields["stop_token_ids"] = (rng.randrange(40),)
        if rng.random() < 0.2:
            fields["min_new_tokens"] = min(5, fields["max_new_tokens"])
        if rng.random() < 0.2:
            fields["stop"] = ("x",)
        fields |= {"cache_salt": rng.choice(["", "", "other"]), "priority": rng.choice([0, 0, 1])}
        fields["client"] = clients[rng.randrange(len(clients))]
        asked.append(harness.ask(f"r{i}", next(prompts), rng.randrange(3), rng.random() < 0.6, **fields))
        harness.step(rng.choice([0, 0, 1, 4]))
        if rng.random() < 0.25:
            victim = f"r{rng.randrange(i + 1)}"
            gone.add(victim)
            harness.inbox.append(rng.choice([AbortReq(rid=victim), StopReq(rid=victim)]))
    harness.run_until_idle()
    for req in asked:
        if req.rid not in gone:
            harness.check_answer(req)
        else:
            want, got = harness.expected(req), harness.tokens(req.rid)
            assert got == want[: len(got)]
            assert sum(out.finish is not None for out in harness.outs(req.rid)) <= 1
    harness.check_empty()
    assert harness.worker.most_unread <= (1 if harness.limits.overlap and overlap else 0)


@pytest.mark.parametrize("mixed", [False, True])
def test_storm_settings_cause_retraction_prefix_hits_and_mixed_steps(mixed: bool) -> None:
    """These settings cause retractions, prefix hits, chunks, and full memory with a step in flight; mixed steps too."""
    limits = limits_of(max_total_tokens=96, max_accept_len=3, tokens_per_step=4, prefix_lookahead=1, mixed=mixed)
    harness = Harness(limits, schedule_conservativeness=0.0)
    stem = list(range(10, 30))
    asked = [harness.ask(f"r{i}", [*stem, i], max_new_tokens=40, ignore_eos=True) for i in range(6)]
    harness.run_until_idle()
    for req in asked:
        harness.check_answer(req)
    state = harness.scheduler.stats
    assert state.num_retracted_requests_total > 0
    assert state.cached_tokens_total > 0
    assert (state.mixed_steps > 0) == mixed
    harness.check_empty()


# ---- prompts and decoding in one step


def steps_of(harness: Harness) -> list[tuple[int, int]]:
    """(prompt tokens, requests that decode) of every step so far."""
    return [(len(b.token_ids), b.num_decodes) for b in harness.worker.batches]


def test_running_requests_decode_beside_every_chunk_of_a_long_prompt() -> None:
    harness = Harness(limits_of(mixed=True), chunked_prefill_size=9)
    short = harness.ask("short", [1, 2], max_new_tokens=60, ignore_eos=True)
    harness.step(3)
    long = harness.ask("long", list(range(30)) * 2, max_new_tokens=20, ignore_eos=True)
    harness.run_until_idle()
    steps = steps_of(harness)
    first = steps.index((8, 1))
    assert steps[:first] == [(2, 0), *[(0, 1)] * (first - 1)]
    assert steps[first : first + 8] == [*[(8, 1)] * 7, (4, 1)], "the decode row takes one token of the chunk"
    assert steps[first + 8] == (0, 2), "a request decodes from the step after its last chunk"
    for req in (short, long):
        harness.check_answer(req)
    state = harness.scheduler.stats
    assert (state.extend_steps, state.mixed_steps, state.extend_steps + state.decode.steps) == (9, 8, len(steps))
    harness.check_empty()


def test_short_prompts_run_without_decode_rows() -> None:
    harness = Harness(limits_of(mixed=True, piggyback_min_tokens=8), chunked_prefill_size=9)
    harness.ask("runs", [1, 2], max_new_tokens=60, ignore_eos=True)
    harness.step(3)
    harness.ask("short", list(range(7)), max_new_tokens=4, ignore_eos=True)
    harness.run_until_idle()
    assert (7, 0) in steps_of(harness)
    harness.ask("runs too", [1, 2], max_new_tokens=60, ignore_eos=True)
    harness.step(3)
    harness.ask("long", list(range(20, 28)), max_new_tokens=4, ignore_eos=True)
    harness.run_until_idle()
    assert (8, 1) in steps_of(harness)
    harness.check_empty()


def test_decode_rows_take_at_most_half_of_a_chunk() -> None:
    """Windows of 4 tokens, chunks of 32: four decode rows fit beside a chunk; five decode between two prompt steps."""
    for running in range(1, 7):
        harness = Harness(limits_of(mixed=True, max_accept_len=3, tokens_per_step=4, max_total_tokens=2048), chunked_prefill_size=32)
        asked = [harness.ask(f"r{i}", [i], max_new_tokens=100, ignore_eos=True) for i in range(running)]
        harness.step(3)
        asked.append(harness.ask("long", [39, *range(20)] * 5, max_new_tokens=2, ignore_eos=True))
        harness.run_until_idle()
        prompts = [step for step in steps_of(harness)[1:] if step[0]]
        if running <= 4:
            assert prompts[0] == (32 - 4 * running, running)
            assert all(tokens + 4 * decodes <= 32 and decodes for tokens, decodes in prompts)
        else:
            assert prompts == [(32, 0), (32, 0), (32, 0), (9, 0)]
        for req in asked:
            harness.check_answer(req)


def test_uncut_prompts_run_without_decode_rows() -> None:
    harness = Harness(limits_of(mixed=True, max_extend_tokens=40), chunked_prefill_size=-1, max_prefill_tokens=100)
    for i in range(4):
        harness.ask(f"r{i}", [i] * 40, max_new_tokens=9, ignore_eos=True)
        harness.step(2)
    harness.run_until_idle()
    assert harness.scheduler.stats.mixed_steps == harness.scheduler.stats.num_failed_steps_total == 0
    assert [tokens for tokens, _ in steps_of(harness) if tokens] == [40] * 4


def test_a_worker_without_mixed_steps_gets_none() -> None:
    harness = Harness(limits_of(), chunked_prefill_size=8)
    for i in range(6):
        harness.ask(f"r{i}", [i] * 20, max_new_tokens=9, ignore_eos=True)
        harness.step(2)
    harness.run_until_idle()
    assert not any(batch.num_prompts and batch.num_decodes for batch in harness.worker.batches)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mixed_step_never_causes_a_retraction(overlap: bool) -> None:
    """An admitted prompt takes nearly all pages. The decode row soon lacks one; the remaining chunks then run alone."""
    limits = limits_of(mixed=True, max_total_tokens=32, overlap=overlap)
    harness = Harness(limits, schedule_conservativeness=0.0, chunked_prefill_size=4, max_prefill_tokens=64)
    first = harness.ask("first", [1, 2], max_new_tokens=24, ignore_eos=True)
    harness.step(8)
    second = harness.ask("second", [7] * (32 - harness.scheduler.groups.only.kv_pages.used - 4), max_new_tokens=2, ignore_eos=True)
    while sum(tokens for tokens, _ in steps_of(harness)[1:]) < len(second.input_ids):
        harness.step()
        assert harness.scheduler.stats.num_retracted_requests_total == 0
    decodes = [rows for tokens, rows in steps_of(harness)[1:] if tokens]
    assert 0 < sum(decodes) < len(decodes), "first some chunks with the decode row, then some without"
    assert decodes == sorted(decodes, reverse=True)
    harness.run_until_idle()
    for req in (first, second):
        harness.check_answer(req)
    harness.check_empty()


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
def test_a_failed_mixed_step_fails_its_prompts_and_decode_rows(where: str) -> None:
    harness = Harness(limits_of(mixed=True), chunked_prefill_size=16, max_prefill_tokens=16)

    def fail(batch: ScheduleBatch) -> None:
        if batch.num_prompts and batch.num_decodes == 2:
            raise Injected

    setattr(harness.worker, where, fail)
    decoding = [harness.ask(f"d{i}", [i] * 3, max_new_tokens=50, ignore_eos=True) for i in range(2)]
    harness.step(4)
    harness.ask("prompt", [9] * 40, max_new_tokens=3, ignore_eos=True)
    harness.run_until_idle()
    assert [harness.finish(rid).status for rid in ("d0", "d1", "prompt")] == [500] * 3
    assert harness.scheduler.stats.num_failed_steps_total >= 1
    harness.check_empty()
    setattr(harness.worker, where, lambda batch: None)
    again = harness.ask("again", decoding[0].input_ids, max_new_tokens=5, ignore_eos=True)
    harness.run_until_idle()
    harness.check_answer(again)


def test_logprobs_of_both_parts_of_a_mixed_step_follow_their_tokens() -> None:
    harness = Harness(limits_of(mixed=True, max_accept_len=3, tokens_per_step=3), chunked_prefill_size=12)
    asked = []
    for i in range(4):
        prompt = [i + t for t in range(3 + 9 * i)]
        asked.append(harness.ask(f"r{i}", prompt, i, max_new_tokens=25, ignore_eos=True, top_logprobs=i - 1, prompt_logprobs=i > 0))
        harness.step(3)
    harness.run_until_idle()
    assert harness.scheduler.stats.mixed_steps > 4
    for i, ask in enumerate(asked):
        harness.check_answer(ask)
        ids, n = ask.input_ids + harness.tokens(ask.rid), len(ask.input_ids)
        got = [out.logprobs for out in harness.outs(ask.rid)]
        chosen = [c for part in got if part for c in part.chosen]
        assert chosen == ([logprob(ids[:at], 0) for at in range(n, len(ids))] if i else [])
        if i:
            (prompts,) = [out.prompt_logprobs for out in harness.outs(ask.rid) if out.prompt_logprobs]
            assert prompts.chosen == [None] + [logprob(ids[:at], 0) for at in range(1, n)]


# ---- overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_submits_the_next_step_before_reading_the_last(overlap: bool) -> None:
    harness = Harness(limits_of(), overlap=overlap)
    harness.ask("a", [5, 6], max_new_tokens=10, ignore_eos=True)
    harness.run_until_idle()
    assert harness.worker.most_unread == int(overlap)


def test_a_request_known_to_end_by_length_is_not_scheduled_again() -> None:
    harness = Harness(limits_of())
    harness.ask("a", [5, 6], max_new_tokens=4, ignore_eos=True)
    harness.run_until_idle()
    assert [b.num_prompts for b in harness.worker.batches] == [1, 0, 0, 0]


def test_accepted_tokens_after_the_first_ending_are_dropped() -> None:
    harness = Harness(limits_of(max_accept_len=4, tokens_per_step=5, prefix_lookahead=1))
    asked = [harness.ask(f"r{n}", [n, 8, 9], max_new_tokens=n, ignore_eos=True) for n in range(1, 12)]
    harness.run_until_idle()
    for req in asked:
        harness.check_answer(req)
    harness.check_empty()


# ---- the policy at work


def test_running_requests_decode_between_the_chunks_of_a_long_prompt() -> None:
    harness = Harness(limits_of(), chunked_prefill_size=8)
    harness.ask("short", [1, 2], max_new_tokens=60, ignore_eos=True)
    harness.step(3)
    harness.ask("long", list(range(30)) * 2, max_new_tokens=2, ignore_eos=True)
    harness.run_until_idle()
    prompts = [b.num_prompts for b in harness.worker.batches]
    first, last = 1 + prompts[1:].index(1), len(prompts) - 1 - prompts[::-1].index(1)
    window = prompts[first : last + 1]
    assert window.count(1) == 8
    assert all(count != after for count, after in pairwise(window))


def test_as_many_prompt_tokens_as_allowed_run_between_two_decode_steps() -> None:
    harness = Harness(limits_of(), chunked_prefill_size=8, max_prefill_tokens=24)
    harness.ask("short", [1, 2], max_new_tokens=60, ignore_eos=True)
    harness.step(3)
    harness.ask("long", list(range(30)) * 2, max_new_tokens=2, ignore_eos=True)
    harness.run_until_idle()
    modes = "".join("e" if b.num_prompts else "d" for b in harness.worker.batches)
    assert max(len(run) for run in modes[1:].split("d")) == 3
    harness.check_empty()


def test_several_prompts_share_one_extend_batch_within_its_budget() -> None:
    harness = Harness(limits_of(max_extend_tokens=20))
    for i in range(4):
        harness.ask(f"r{i}", [i] * 8, max_new_tokens=1)
    harness.run_until_idle()
    assert [b.extend_lens.tolist() for b in harness.worker.batches] == [[8, 8, 4], [4, 8]]


def test_few_prompts_that_saturate_the_device_run_one_per_step() -> None:
    def steps(prompts: int, **asked: Any) -> list[list[int]]:
        harness = Harness(limits_of(max_extend_tokens=20, max_running_requests=16, saturating_tokens=7), **asked)
        for i in range(prompts):
            harness.ask(f"r{i}", [i] * (8 if i else 4), max_new_tokens=1)
        harness.run_until_idle()
        return [b.extend_lens.tolist() for b in harness.worker.batches]

    assert steps(4) == [[4, 8], [8], [8]], "a short prompt leaves room for another; a long one does not"
    assert steps(9)[:2] == [
        [4, 8, 8],
        [8],
    ], "the first of many share a step, the last eight do not"
    assert steps(3, chunked_prefill_size=6) == [[4, 2], [6], [6], [2]]


def test_chunks_are_large_while_many_tokens_wait() -> None:
    harness = Harness(
        limits_of(max_running_requests=4, max_total_tokens=2048), chunked_prefill_size=8, max_prefill_tokens=32, largest_chunk_size=20
    )
    for i in range(4):
        harness.ask(f"r{i}", [i + j % 30 for j in range(30)], max_new_tokens=1, ignore_eos=True)
    harness.run_until_idle()
    assert [len(b.token_ids) for b in harness.worker.batches if b.num_prompts] == [20, 20, 20, 8, 8, 8, 8, 8, 8, 8, 4]
    harness.check_empty()


def test_piggyback_candidates_do_not_keep_short_prompts_apart() -> None:
    harness = Harness(
        limits_of(mixed=True, tokens_per_step=4, saturating_tokens=7, piggyback_min_tokens=20),
        chunked_prefill_size=64,
    )
    for rid in ("a", "b"):
        harness.ask(rid, [1, 2, 3], max_new_tokens=30, ignore_eos=True)
    harness.step(6)
    before = len(harness.worker.batches)
    for i in range(3):
        harness.ask(f"r{i}", [10 + i, 4], max_new_tokens=1)
    harness.run_until_idle()
    assert [b.extend_lens.tolist() for b in harness.worker.batches[before:] if len(b.extend_lens)] == [[2, 2, 2]]
    assert harness.scheduler.stats.mixed_steps == 0, "prompts so short run without decode rows"


def test_without_chunking_a_prompt_is_prefilled_whole_unless_the_worker_cannot() -> None:
    harness = Harness(limits_of(max_extend_tokens=20), chunked_prefill_size=-1)
    for i, size in enumerate([12, 12, 50]):
        harness.ask(f"r{i}", [i] * size, max_new_tokens=1)
    harness.run_until_idle()
    assert [b.extend_lens.tolist() for b in harness.worker.batches] == [[12], [12], [20], [20], [10]]


def test_an_equal_prompt_is_deferred_and_reuses_the_first() -> None:
    harness = Harness(limits_of())
    prompt = [7, 8] * 30
    equals = [harness.ask(f"r{i}", prompt, max_new_tokens=3) for i in range(4)]
    harness.run_until_idle()
    for req in equals:
        harness.check_answer(req)
    assert [harness.outs(f"r{i}")[-1].progress.cached_tokens for i in range(4)] == [0, 59, 59, 59]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("shared", "together", "cached"), [(48, 2, 0), (64, 1, 63), (65, 1, 64), (100, 1, 64)])
def test_a_prompt_is_deferred_only_for_whole_pages_of_the_other(shared: int, together: int, cached: int, lookahead: int) -> None:
    shared -= 1 - lookahead  # where pages need not know the token after them, one shared token less is enough
    harness = Harness(limits_of(page_size=64, max_total_tokens=1024, prefix_lookahead=lookahead), chunked_prefill_size=256)
    equals = [harness.ask(f"r{i}", [*[7] * shared, 10 + i, 4, 5], max_new_tokens=1) for i in range(2)]
    harness.run_until_idle()
    for req in equals:
        harness.check_answer(req)
    assert [len(b.extend_lens) for b in harness.worker.batches] == [together] * (2 // together)
    assert harness.outs("r1")[-1].progress.cached_tokens == cached


def test_prompts_with_different_salts_share_nothing() -> None:
    harness = Harness(limits_of())
    for salt in ("a", "b"):
        harness.ask(salt, [7, 8] * 30, max_new_tokens=1, cache_salt=salt)
        harness.run_until_idle()
    assert [harness.outs(salt)[-1].progress.cached_tokens for salt in ("a", "b")] == [0, 0]


def test_lookahead_reuses_one_token_less_where_prompts_part() -> None:
    for lookahead, cached in ((0, 10), (1, 9)):
        harness = Harness(limits_of(prefix_lookahead=lookahead))
        harness.ask("a", [*range(10, 20), 1, 1], max_new_tokens=1)
        harness.run_until_idle()
        b = harness.ask("b", [*range(10, 20), 2, 2], max_new_tokens=5)
        harness.run_until_idle()
        harness.check_answer(b)
        assert harness.outs("b")[-1].progress.cached_tokens == cached


def test_a_higher_priority_starts_first() -> None:
    harness = Harness(limits_of(max_running_requests=1))
    harness.ask("low", [1], max_new_tokens=2, ignore_eos=True)
    harness.ask("high", [2], max_new_tokens=2, ignore_eos=True, priority=5)
    harness.run_until_idle()
    ended = [out.rid for m in harness.sent if isinstance(m, TokensOutBatch) for out in m.outs if out.finish]
    assert ended == ["high", "low"]


def test_the_youngest_is_retracted_and_the_oldest_never() -> None:
    harness = Harness(limits_of(max_total_tokens=64), schedule_conservativeness=0.0)
    asked = [harness.ask(f"r{i}", [i] * 6, max_new_tokens=50, ignore_eos=True) for i in range(4)]
    harness.run_until_idle()
    assert harness.scheduler.stats.num_retracted_requests_total > 0
    ended = [out.rid for m in harness.sent if isinstance(m, TokensOutBatch) for out in m.outs if out.finish]
    assert ended == ["r0", "r1", "r2", "r3"]
    for req in asked:
        harness.check_answer(req)


def test_a_retracted_request_goes_before_those_that_wait() -> None:
    harness = Harness(limits_of(max_total_tokens=64, max_running_requests=2), schedule_conservativeness=0.0)
    asked = [harness.ask(f"r{i}", [i] * 6, max_new_tokens=50, ignore_eos=True) for i in range(4)]
    while harness.scheduler.stats.num_retracted_requests_total == 0:
        harness.step()
    waiting = [req.rid for req in harness.scheduler.groups.only.queue]
    harness.run_until_idle()
    assert waiting == ["r1", "r2", "r3"]
    for req in asked:
        harness.check_answer(req)


def test_prompt_logprobs_are_whole_after_a_retraction_between_chunks() -> None:
    harness = Harness(limits_of(max_total_tokens=64), chunked_prefill_size=4, schedule_conservativeness=0.0)
    old = harness.ask("old", [9] * 6, max_new_tokens=50, ignore_eos=True)
    harness.step(20)
    ask = harness.ask("a", list(range(35)), max_new_tokens=3, ignore_eos=True, top_logprobs=0, prompt_logprobs=True)
    harness.run_until_idle()
    assert harness.scheduler.stats.num_retracted_requests_total == 1
    for req in (old, ask):
        harness.check_answer(req)
    prompts = [out.prompt_logprobs for out in harness.outs("a") if out.prompt_logprobs]
    assert [p.chosen for p in prompts] == [[None] + [logprob(range(i), 0) for i in range(1, 35)]]


@pytest.mark.parametrize("chunk", [4, 64])
def test_a_pooling_request_ends_with_its_prompt_and_emits_nothing(chunk: int) -> None:
    harness = Harness(limits_of(), chunked_prefill_size=chunk)
    prompt = list(range(30))
    harness.ask("text", prompt, max_new_tokens=3, ignore_eos=True)
    harness.run_until_idle()
    kinds = {"mean": Pooling(kind="mean"), "last": Pooling(kind="last"), "labels": Pooling(kind="labels", label_ids=(3, 7))}
    for name, pooling in kinds.items():
        harness.ask(name, prompt, max_new_tokens=1, pooling=pooling)
    harness.run_until_idle()
    for name, pooling in kinds.items():
        (out,) = harness.outs(name)
        assert (out.token_ids, out.progress.completion_tokens, harness.finish(name).reason) == ([], 0, "stop")
        divisor = len(prompt) if name == "mean" else 1
        assert out.pooled == pytest.approx((pooled(pooling, prompt) / divisor).tolist())
        assert (out.progress.cached_tokens > 0) == (name != "mean")  # a mean needs the states of the whole prompt
    assert all(out.pooled is None for out in harness.outs("text"))
    harness.check_empty()


def test_pooled_states_are_whole_after_a_retraction_between_chunks() -> None:
    harness = Harness(limits_of(max_total_tokens=64), chunked_prefill_size=4, schedule_conservativeness=0.0)
    old = harness.ask("old", [9] * 6, max_new_tokens=50, ignore_eos=True)
    harness.step(20)
    harness.ask("a", list(range(35)), max_new_tokens=1, pooling=Pooling(kind="mean"))
    harness.run_until_idle()
    assert harness.scheduler.stats.num_retracted_requests_total == 1
    harness.check_answer(old)
    assert harness.outs("a")[-1].pooled == pytest.approx((pooled(Pooling(kind="mean"), range(35)) / 35).tolist())


def test_an_aborted_pooling_request_has_no_vector() -> None:
    harness = Harness(limits_of(), chunked_prefill_size=4)
    harness.ask("a", list(range(30)), max_new_tokens=1, pooling=Pooling(kind="mean"))
    harness.step(3)
    harness.inbox.append(AbortReq(rid="a"))
    harness.run_until_idle()
    assert harness.finish("a").reason == "abort"
    assert harness.outs("a")[-1].pooled is None
    harness.check_empty()


def test_a_conservative_server_never_retracts() -> None:
    harness = Harness(limits_of(max_total_tokens=64), schedule_conservativeness=2.0)
    for i in range(4):
        harness.ask(f"r{i}", [i] * 6, max_new_tokens=50, ignore_eos=True)
    harness.run_until_idle()
    assert harness.scheduler.stats.num_retracted_requests_total == 0


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "fields", "status", "words"),
    [
        ([1] * 128, {}, 400, "to at most 127 tokens"),
        ([1] * 60, {"max_new_tokens": 10}, 400, "69 KV slots; the server has 64"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_a_reason(prompt: list[int], fields: dict[str, Any], status: int, words: str) -> None:
    harness = Harness(limits_of(max_total_tokens=64))
    harness.ask("bad", prompt, **fields)
    harness.run_until_idle()
    finish = harness.finish("bad")
    assert (finish.reason, finish.status) == ("abort", status)
    assert words in finish.message
    assert harness.worker.batches == []
    harness.check_empty()


def test_a_request_that_just_fits_runs() -> None:
    harness = Harness(limits_of(max_total_tokens=64, max_accept_len=3, tokens_per_step=4), radix_cache=True)
    req = harness.ask("a", [1] * 52, max_new_tokens=10, ignore_eos=True)
    harness.run_until_idle()
    harness.check_answer(req)
    harness.ask("b", [1] * 52, max_new_tokens=11, ignore_eos=True)
    harness.run_until_idle()
    assert harness.finish("b").status == 400


def test_output_beyond_the_context_ends_by_length_there() -> None:
    harness = Harness(limits_of())
    req = harness.ask("a", [1] * 120, max_new_tokens=(1 << 31) - 1, ignore_eos=True)
    harness.run_until_idle()
    harness.check_answer(req)
    assert len(harness.tokens("a")) == 8


def test_requests_beyond_the_queue_limit_get_429() -> None:
    harness = Harness(limits_of(max_running_requests=1), max_queued_requests=2)
    for i in range(4):
        harness.ask(f"r{i}", [i], max_new_tokens=3, ignore_eos=True)
    harness.run_until_idle()
    assert [harness.finish(f"r{i}").status for i in range(4)] == [0, 0, 0, 429], "one gets the row, two may wait"


def test_requests_with_a_free_row_do_not_count_as_queued() -> None:
    harness = Harness(limits_of(max_running_requests=8), max_queued_requests=1)
    for i in range(10):
        harness.ask(f"r{i}", [i], max_new_tokens=3, ignore_eos=True)
    harness.run_until_idle()
    assert [harness.finish(f"r{i}").status for i in range(10)] == [0] * 9 + [429]


def test_a_second_request_of_the_same_name_does_not_disturb_the_first(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(limits_of())
    req = harness.ask("a", [1, 2], max_new_tokens=5)
    harness.ask("a", [3], max_new_tokens=5)
    with caplog.at_level(logging.ERROR):
        harness.run_until_idle()
    harness.check_answer(req)
    assert "second request" in caplog.text


# ---- ends from outside


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_frees_everything_within_one_step_wherever_the_request_is(steps: int) -> None:
    harness = Harness(limits_of(max_running_requests=1), chunked_prefill_size=10)
    for rid in ("a", "b"):
        harness.ask(rid, list(range(35)), max_new_tokens=50, ignore_eos=True)
    harness.step(steps)
    harness.inbox.append(AbortReq(rid="b"))
    harness.inbox.append(AbortReq(rid="a"))
    harness.step()
    assert harness.scheduler.groups.only.kv_pages.used == 0
    assert [harness.finish(rid).reason for rid in ("a", "b")] == ["abort", "abort"]
    harness.run_until_idle()
    harness.check_empty()


def test_abort_all_ends_every_request_once() -> None:
    harness = Harness(limits_of(max_running_requests=2))
    for i in range(5):
        harness.ask(f"r{i}", [i], max_new_tokens=50, ignore_eos=True)
    harness.step(3)
    harness.inbox += [AbortReq(all=True), AbortReq(rid="r0"), AbortReq(rid="unknown")]
    harness.run_until_idle()
    assert [harness.finish(f"r{i}").reason for i in range(5)] == ["abort"] * 5
    assert harness.scheduler.stats.num_aborted_requests_total == 5
    harness.check_empty()


def test_a_stop_request_sends_no_reply_and_caches_the_prefix() -> None:
    harness = Harness(limits_of())
    harness.ask("a", list(range(20)), max_new_tokens=50, ignore_eos=True, stop=("x",))
    harness.step(6)
    replies = len(harness.outs("a"))
    harness.inbox.append(StopReq(rid="a"))
    harness.run_until_idle()
    assert len(harness.outs("a")) == replies
    assert all(out.finish is None for out in harness.outs("a"))
    harness.ask("b", list(range(20)), max_new_tokens=1)
    harness.run_until_idle()
    assert harness.outs("b")[-1].progress.cached_tokens == 19
    harness.check_empty()


# ---- failures


class Injected(RuntimeError):
    """A failure made by a test."""


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
@pytest.mark.parametrize("seed", range(12))
def test_a_failed_step_fails_its_requests_only_and_leaks_nothing(where: str, seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(limits_of(page_size=rng.choice([1, 4]), max_running_requests=3), chunked_prefill_size=8)
    broken: set[int] = set()
    doomed = rng.sample(range(2, 40), 2)

    def fail(batch: ScheduleBatch) -> None:
        if batch.step in doomed:
            broken.add(batch.step)
            raise Injected

    setattr(harness.worker, where, fail)
    asked = [
        harness.ask(f"r{i}", [rng.randrange(40) for _ in range(rng.randint(1, 20))], i, max_new_tokens=9, ignore_eos=True) for i in range(9)
    ]
    harness.run_until_idle()
    assert broken
    lost = [req for req in asked if harness.finish(req.rid).reason == "abort"]
    assert 0 < len(lost) < len(asked)
    for req in asked:
        if req in lost:
            assert harness.finish(req.rid).status == 500
        else:
            harness.check_answer(req)
    harness.check_empty()


def test_a_hundred_failures_far_apart_leak_nothing() -> None:
    harness = Harness(limits_of(page_size=4))
    harness.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected()) if not batch.num_prompts else None
    for i in range(100):
        harness.now += 31.0
        harness.ask(f"r{i}", [i % 40] * 9, max_new_tokens=1 + i % 2 * 20, ignore_eos=True)
        harness.inbox.append(AbortReq(rid="unknown"))
        harness.run_until_idle()
    assert harness.scheduler.stats.num_failed_steps_total >= 50
    harness.check_empty()


def test_kv_of_a_failed_step_is_not_reused() -> None:
    harness = Harness(limits_of())
    harness.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected()) if batch.step == 1 else None
    harness.ask("a", list(range(20)), max_new_tokens=5)
    harness.run_until_idle()
    assert harness.finish("a").status == 500
    assert harness.scheduler.groups.only.kv_pages.cache.total_pages == 0


def test_output_kv_of_a_failed_request_is_not_cached() -> None:
    harness = Harness(limits_of())
    harness.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected()) if batch.step == 9 else None
    harness.ask("a", list(range(20)), max_new_tokens=50, ignore_eos=True)
    harness.run_until_idle()
    assert harness.finish("a").status == 500
    assert harness.scheduler.groups.only.kv_pages.cache.total_pages == 20  # the prompt, published before the failure


def test_an_abort_caches_no_kv_of_an_unread_step() -> None:
    """It may still fail."""
    harness = Harness(limits_of(), chunked_prefill_size=8)
    harness.ask("a", list(range(20)), max_new_tokens=5)
    harness.scheduler.step()
    harness.scheduler.step()  # the first chunk is read, the second in flight
    harness.inbox.append(AbortReq(rid="a"))
    harness.worker.fail_wait = lambda batch: (_ for _ in ()).throw(Injected())
    harness.run_until_idle()
    assert harness.scheduler.groups.only.kv_pages.cache.total_pages == 8


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
def test_three_failures_within_a_minute_answer_all_and_end_the_process(where: str) -> None:
    harness = Harness(limits_of())
    setattr(harness.worker, where, lambda batch: (_ for _ in ()).throw(Injected()))
    for i in range(3):
        harness.ask(f"r{i}", [i], max_new_tokens=1)
        if i < 2:
            harness.run_until_idle()
    with pytest.raises(RuntimeError, match="3 steps failed") as raised:
        harness.run_until_idle()
    assert isinstance(raised.value.__cause__, Injected)
    assert [harness.finish(f"r{i}").status for i in range(3)] == [500, 500, 500]


# ---- replies


def test_request_info_comes_before_the_first_tokens() -> None:
    harness = Harness(limits_of())
    harness.ask("a", [1], max_new_tokens=1, stop=("x",))
    harness.ask("bad", [1] * 128, max_new_tokens=1)
    harness.run_until_idle()
    for rid in ("a", "bad"):
        info = next(i for i, m in enumerate(harness.sent) if isinstance(m, RequestInfo) and m.rid == rid)
        first = next(i for i, m in enumerate(harness.sent) if isinstance(m, TokensOutBatch) and any(o.rid == rid for o in m.outs))
        assert info < first


@pytest.mark.parametrize(
    ("stream", "stop", "interval", "sizes"),
    [(True, (), 1, [1] * 7), (True, (), 3, [1, 3, 3]), (False, (), 1, [7]), (False, ("x",), 3, [1] * 7)],
)
def test_tokens_are_sent_at_the_stream_interval(stream: bool, stop: tuple[str, ...], interval: int, sizes: list[int]) -> None:
    harness = Harness(limits_of(), stream_interval=interval)
    harness.ask("a", [1], stream=stream, max_new_tokens=7, ignore_eos=True, stop=stop)
    harness.run_until_idle()
    assert [len(out.token_ids) for out in harness.outs("a")] == sizes


@pytest.mark.parametrize("most", [10, 11, 12, 13])
def test_logprobs_follow_their_tokens(most: int) -> None:
    harness = Harness(limits_of(max_accept_len=3, tokens_per_step=3), stream_interval=4, chunked_prefill_size=3)
    plain = harness.ask("plain", [4, 5], max_new_tokens=11, ignore_eos=True)
    req = harness.ask("a", [1, 2, 3, 4, 5, 6, 7], max_new_tokens=most, ignore_eos=True, top_logprobs=1, prompt_logprobs=True)
    again = harness.ask("b", [1, 2, 3, 4, 5, 6, 7], max_new_tokens=4, ignore_eos=True, top_logprobs=2, prompt_logprobs=True, stream=False)
    harness.run_until_idle()
    assert all(out.logprobs is None for out in harness.outs("plain"))
    harness.check_answer(plain)
    for ask, k in ((req, 1), (again, 2)):
        harness.check_answer(ask)
        ids = ask.input_ids + harness.tokens(ask.rid)
        got = [out.logprobs for out in harness.outs(ask.rid)]
        chosen = [c for part in got if part for c in part.chosen]
        assert chosen == [logprob(ids[:i], 0) for i in range(7, len(ids))]
        assert all(len(top) == k for part in got if part for top in part.top)
        prompts = [out.prompt_logprobs for out in harness.outs(ask.rid) if out.prompt_logprobs]
        assert len(prompts) == 1
        assert prompts[0].chosen == [None] + [logprob(ids[:i], 0) for i in range(1, 7)]
        assert prompts[0].top == [[]] + [[(r, logprob(ids[:i], r)) for r in range(k)] for i in range(1, 7)]


def test_speculation_is_counted_by_position() -> None:
    harness = Harness(limits_of(max_accept_len=4, tokens_per_step=4))
    harness.ask("a", [1, 2], max_new_tokens=30, ignore_eos=True)
    harness.run_until_idle()
    spec = harness.outs("a")[-1].progress.spec
    assert spec is not None
    assert spec.draft_tokens == 3 * spec.verify_steps
    assert sum(spec.accepted_by_position) == spec.accepted_tokens
    assert spec.accepted_by_position == sorted(spec.accepted_by_position, reverse=True)
    assert 30 <= 1 + spec.verify_steps + spec.accepted_tokens < 34
    total = harness.scheduler.stats.spec
    assert (total.verify_steps, total.accepted_by_position) == (spec.verify_steps, spec.accepted_by_position)


@pytest.mark.parametrize("asked", [{}, {"running_counts": True}, {"stop": ("never",)}])
def test_counts_of_steps_come_with_the_last_reply_or_with_each(asked: dict[str, Any]) -> None:
    harness = Harness(limits_of(max_accept_len=4, tokens_per_step=4))
    harness.ask("a", [1, 2], max_new_tokens=30, ignore_eos=True, **asked)
    harness.run_until_idle()
    first, *others, last = [out.progress for out in harness.outs("a")]
    assert last.spec == harness.scheduler.stats.spec
    assert last.decode.steps == last.spec.verify_steps == len(others) + 1
    assert (first.spec, first.decode.steps) == (None, 0)
    steps = list(range(1, len(others) + 1)) if asked else [0] * len(others)
    assert len(steps) > 3
    assert [progress.decode.steps for progress in others] == steps
    assert [progress.spec.verify_steps if progress.spec is not None else 0 for progress in others] == steps


def control(harness: Harness, what: Any, folder: str = "") -> Any:
    harness.inbox.append(ControlReq(call_id=f"c{len(harness.sent)}", what=what, folder=folder))
    harness.step()
    return next(m.result for m in reversed(harness.sent) if isinstance(m, ControlReply))


def test_server_info_names_every_figure() -> None:
    harness = Harness(limits_of())
    for i in range(3):
        harness.ask(f"r{i}", [i, 5, 6], max_new_tokens=5, ignore_eos=True)
    harness.run_until_idle()
    harness.ask("r3", [0, 5, 6], max_new_tokens=5, ignore_eos=True)
    harness.step(2)
    state = control(harness, "stats").figures()
    assert state["worker"]["startup_seconds"] == {"load": 1.5}
    assert state["startup_seconds"] == {"load": 1.5}
    assert (state["num_running_reqs"], state["num_queue_reqs"], state["num_requests_total"]) == (1, 0, 4)
    assert (state["prompt_tokens_total"], state["cached_tokens_total"], state["cache_hit_rate"]) == (12, 2, 2 / 12)
    assert 0 < state["token_usage"] < 0.1
    assert state["padded_rows_total"] == state["decode_steps"] == state["graph_steps_total"] > state["eager_steps_total"] == 0
    harness.run_until_idle()
    harness.now += 2.0
    harness.step()
    assert as_sent(harness.scheduler.heartbeat()).stats == harness.scheduler.stats
    assert harness.scheduler.stats.generation_tokens_total == 20


def test_the_cache_is_flushed_only_when_idle() -> None:
    harness = Harness(limits_of())
    harness.ask("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    harness.step(2)
    refused = control(harness, "flush_cache")
    assert "1 now" in refused.message
    assert (refused.status, refused.code) == (409, "cache_busy")
    harness.inbox.append(AbortReq(all=True))  # leaves a step in flight whose requests have all ended
    assert control(harness, "flush_cache") == CacheFlushed(pages=4)
    assert harness.scheduler.groups.only.kv_pages.allocator.available == 512


def test_flushing_the_cache_restarts_the_acceptance_figures() -> None:
    harness = Harness(limits_of(max_accept_len=4, tokens_per_step=4))
    harness.ask("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    harness.run_until_idle()
    assert harness.scheduler.stats.spec.verify_steps > 0
    generated = harness.scheduler.stats.generation_tokens_total
    assert isinstance(control(harness, "flush_cache"), CacheFlushed)
    assert harness.scheduler.stats.spec == SpecStats()
    assert harness.scheduler.stats.generation_tokens_total == generated
    harness.ask("b", [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    harness.run_until_idle()
    harness.scheduler._stats_log.tick(1e9)
    assert 0 < harness.scheduler.stats.spec.verify_steps < 20


def test_profiling_is_passed_to_the_worker_and_its_error_to_the_caller() -> None:
    harness = Harness(limits_of())
    assert control(harness, "start_profile", "/tmp/x") == ProfileAt(path="/tmp/x")
    assert control(harness, "stop_profile") == ProfileAt(path="trace.json")
    assert control(harness, "start_profile") == CallFailed(message="no folder", status=500)
    assert control(harness, "start_profile", "/running") == CallFailed(message="A profile is already running. Stop it first.", status=409)


# ---- run()


def test_run_sends_heartheartbeats_and_returns_when_drained() -> None:
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

    config = config_of()
    scheduler = Scheduler(config.scheduler, config.cache, FakeWorker(limits), EOS, receive, lambda message: sent.put(as_sent(message)))
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    heartbeats: list[Heartbeat] = []
    while len(heartbeats) < 3:
        message = sent.get(timeout=10.0)
        assert isinstance(message, Heartbeat)
        heartbeats.append(message)
    assert [(b.who, b.stats is not None) for b in heartbeats] == [("scheduler", True)] * 3
    assert len(waits) < 50, "an idle loop must sleep"
    inbox.put(GenerateReq(rid="a", input_ids=[1, 2], sampling=SamplingParams(max_new_tokens=40, ignore_eos=True), seed=0))
    inbox.put(DrainReq())
    inbox.put(GenerateReq(rid="late", input_ids=[1, 2], sampling=SamplingParams(), seed=0))
    thread.join(timeout=10.0)
    assert not thread.is_alive()
    messages = [sent.get_nowait() for _ in range(sent.qsize())]
    outs = {out.rid: out for m in messages if isinstance(m, TokensOutBatch) for out in m.outs if out.finish}
    assert outs["a"].finish.reason == "length"
    assert outs["late"].finish.status == 503
    assert isinstance(messages[-1], DrainReq)
