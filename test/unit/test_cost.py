"""What a call may cost: texts are refused before they are tokenised, calls before anything of them is sent."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from front import LIMITS, ScriptedScheduler, count_tokenised, front, make_manager
from llama_tokenizer import write_llama_tokenizer
from small_tokenizer import write_small_tokenizer

from event_loop import in_event_loop
from runtime.errors import ContextTooLong, QueuedTokensFull, QueueFull, RequestError, TextTooLong
from runtime.managers import prompt_encoder
from runtime.managers.cost import CallCost, CostLimits
from runtime.managers.generation import RequestOptions
from runtime.managers.prompt_encoder import HUGE_TEXT, PromptEncoder
from runtime.managers.queue_capacity import QueueCapacity
from runtime.managers.request_context import CURRENT_CLIENT, Client
from runtime.sampling_params import SamplingParams
from runtime.text import bounded_encoding
from runtime.text.bounded_encoding import SLICE_CHARS, BoundedEncoding, slices
from runtime.text.tokenizer import Tokenizer


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_tokenised(monkeypatch)


def long_texts() -> list[str]:
    rng = random.Random(0)
    words = ["many", "words", "and", "12", "x == y", "naïve", "東京", "\n\n", "  ", "<|im_end|>", "a'll", "é", "\tdef f():"]
    mixed = " ".join(rng.choice(words) for _ in range(3 * SLICE_CHARS // 3))
    return [mixed, "word " * SLICE_CHARS, "x" * (3 * SLICE_CHARS), " " * (3 * SLICE_CHARS), "ab\n" * SLICE_CHARS]


@pytest.mark.parametrize("kind", ["byte level", "normalizer", "first"])
def test_a_long_text_has_the_tokens_of_the_whole_text(tmp_path: Path, kind: str) -> None:
    folder = write_small_tokenizer(tmp_path) if kind == "byte level" else write_llama_tokenizer(tmp_path, kind)
    tokenizer = Tokenizer.load(folder)
    for text in long_texts():
        for special in (True, False):
            assert tokenizer.encode(text, special) == bounded_encoding.encode_text(tokenizer._hf, text, special)


def test_slices_join_to_the_text_and_cut_between_words() -> None:
    for text in long_texts():
        pieces = list(slices(text))
        assert "".join(pieces) == text
        assert all(piece[0] == " " and piece[1].isalpha() for piece in pieces[1:])
    assert len(list(slices("word " * SLICE_CHARS))) == 5


@pytest.mark.parametrize("kind", ["byte level", "normalizer"])
@pytest.mark.parametrize("unit", ["word ", "7", "é"])
def test_tokenising_stops_soon_after_the_context_is_full(tmp_path: Path, encoded: list[int], kind: str, unit: str) -> None:
    tokenizer = Tokenizer.load(write_small_tokenizer(tmp_path) if kind == "byte level" else write_llama_tokenizer(tmp_path, kind))
    bound = BoundedEncoding(4000, lambda count: ContextTooLong(count, 4001, at_least=True))
    with pytest.raises(ContextTooLong, match="at least"):
        tokenizer.encode(unit * 400_000, bound=bound)
    assert sum(encoded) <= 3 * SLICE_CHARS


@in_event_loop
async def test_a_prompt_far_too_long_is_not_tokenised(encoded: list[int]) -> None:
    async with front() as f:
        for path, body in (
            ("/v1/completions", {"prompt": "a" * (12 << 20)}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (12 << 20)}]}),
            ("/generate", {"text": "a" * (12 << 20)}),
        ):
            answer = await f.post(path, body)
            assert answer.status_code == 400
            assert "characters" in answer.json()["error"]["message"]
        assert encoded == []
        assert await f.fine()


@in_event_loop
async def test_huge_texts_do_not_keep_others_waiting() -> None:
    release = threading.Event()

    class Slow:
        longest_token = 1 << 20

        def encode(self, text: str, add_special_tokens: bool, bound: BoundedEncoding) -> list[int]:
            if len(text) >= HUGE_TEXT:
                release.wait()
            return [1]

    encoder = PromptEncoder(Slow(), 256, 256)  # type: ignore[arg-type]
    huge = [asyncio.create_task(encoder.encode("x" * HUGE_TEXT)) for _ in range(4)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(encoder.encode("x" * (prompt_encoder.LONG_TEXT + 1)), 10) == [1]
    release.set()
    assert await asyncio.gather(*huge) == [[1]] * 4
    encoder.close()


@in_event_loop
async def test_many_short_texts_leave_the_event_loop_to_others(tmp_path: Path) -> None:
    encoder, turns = PromptEncoder(Tokenizer.load(write_small_tokenizer(tmp_path)), 4096, 4096), 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(1000):
        await encoder.encode("short")
    task.cancel()
    assert turns >= 25
    encoder.close()


@in_event_loop
async def test_the_texts_of_one_call_have_one_limit() -> None:
    async with front(max_queued_tokens=20_000) as f:
        assert (await f.post("/tokenize", {"prompt": ["ab " * 2000] * 3})).status_code == 200
        answer = await f.post("/tokenize", {"prompt": ["ab " * 2000] * 4})
        assert answer.status_code == 400
        assert "--max-queued-tokens" in answer.json()["error"]["message"]


@in_event_loop
async def test_a_text_to_tokenise_has_a_limit_of_its_own() -> None:
    async with front(max_queued_tokens=20_000) as f:
        assert (await f.post("/tokenize", {"prompt": "ab " * 6000})).json()["count"] == 18_000
        answer = await f.post("/tokenize", {"prompt": "ab " * 60_000})
        assert answer.status_code == 400
        assert "--max-queued-tokens" in answer.json()["error"]["message"]


# ---- the account of a call


def cost(**limits: int) -> CallCost:
    return CallCost(CostLimits(**{"prompt_tokens": 100, "logprob_cells": 1000, "samples": 10, **limits}))


def test_prompt_tokens_are_shared_by_samples() -> None:
    account = cost()
    account.add(50, 8, SamplingParams(max_new_tokens=5), -1, False)
    assert (account.prompt_tokens, account.samples, account.logprob_cells) == (50, 8, 0)
    with pytest.raises(RequestError, match="--max-queued-tokens"):
        account.add(51, 1, SamplingParams(max_new_tokens=5), -1, False)


@pytest.mark.parametrize(
    ("top", "prompt_logprobs", "n", "cells"), [(-1, False, 3, 0), (0, False, 3, 15), (4, False, 2, 50), (4, True, 2, 250), (0, True, 1, 25)]
)
def test_log_probabilities_are_counted_per_cell(top: int, prompt_logprobs: bool, n: int, cells: int) -> None:
    account = cost()
    account.add(20, n, SamplingParams(max_new_tokens=5), top, prompt_logprobs)
    assert account.logprob_cells == cells


@in_event_loop
async def test_too_many_log_probabilities_are_refused_before_anything_is_sent() -> None:
    scheduler = ScriptedScheduler()
    async with front(scheduler, max_logprob_cells=500) as f:
        body = {"prompt": ["x" * 20] * 3, "echo": True, "logprobs": 5, "max_tokens": 10}
        answer = await f.post("/v1/completions", body)
        assert answer.status_code == 400
        assert "--max-logprob-cells" in answer.json()["error"]["message"]
        assert scheduler.requests == []
        assert (await f.post("/v1/completions", {**body, "prompt": "x" * 20})).status_code == 200


@in_event_loop
async def test_a_call_with_one_bad_prompt_sends_none() -> None:
    scheduler = ScriptedScheduler()
    async with front(scheduler) as f:
        answer = await f.post("/v1/completions", {"prompt": ["good", "x" * 300]})
        assert answer.status_code == 400
        assert scheduler.requests == []


@in_event_loop
async def test_a_query_that_many_prompts_share_is_priced_before_they_are_built() -> None:
    scheduler = ScriptedScheduler()
    async with front(scheduler, max_queued_tokens=1000) as f:
        for path, body in (
            ("/v1/score", {"query": "x" * 100_000, "items": ["y"] * 2000, "label_token_ids": [1]}),
            ("/v1/score", {"query": [1] * 100, "items": [[2]] * 20, "label_token_ids": [1]}),
            ("/v1/rerank", {"query": "x" * 100, "documents": ["y"] * 20}),
        ):
            answer = await f.post(path, body)
            assert answer.status_code == 400
            assert "--max-queued-tokens" in answer.json()["error"]["message"]
        assert scheduler.requests == []


# ---- queue capacity


@in_event_loop
async def test_ended_requests_free_their_queued_tokens() -> None:
    scheduler = ScriptedScheduler(hold=0)
    manager = make_manager(scheduler, max_queued_tokens=300)
    count = (LIMITS.max_total_tokens + 300) // 200
    open_ones = [await manager.generate([5] * 200, SamplingParams(), RequestOptions(n=8)) for _ in range(count)]
    with pytest.raises(QueuedTokensFull) as caught:
        await manager.generate([5] * 200, SamplingParams())
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    open_ones[0].close()
    await manager.generate([5] * 200, SamplingParams())
    manager.close()


@in_event_loop
async def test_samples_of_a_prompt_travel_in_one_message() -> None:
    sent: list[Any] = []
    scheduler = ScriptedScheduler(hold=0)
    manager = make_manager(scheduler)
    manager._send = sent.append
    await manager.generate([5] * 200, SamplingParams(), RequestOptions(n=128))
    (message,) = sent
    samples = list(message.samples())
    assert len(samples) == 128
    assert len({sample.rid for sample in samples}) == len({sample.seed for sample in samples}) == 128
    assert all(sample.input_ids is message.input_ids and sample.more == () for sample in samples)
    manager.close()


def holding(capacity: QueueCapacity, client: str, samples: int) -> None:
    account = cost(samples=1000)
    account.samples = samples
    capacity.check(client, account)
    capacity.add(client, samples, 0)


def test_a_client_alone_has_the_whole_queue() -> None:
    capacity = QueueCapacity(running=2, queued=8, running_tokens=0, queued_tokens=0)
    holding(capacity, "a", 10)
    with pytest.raises(QueueFull):
        holding(capacity, "a", 1)
    capacity.add("a", -1, 0)
    holding(capacity, "a", 1)


def test_a_full_queue_keeps_an_equal_share_for_others() -> None:
    capacity = QueueCapacity(running=2, queued=8, running_tokens=0, queued_tokens=0)
    holding(capacity, "flood", 10)
    holding(capacity, "good", 5)
    with pytest.raises(QueueFull):
        holding(capacity, "good", 1)
    with pytest.raises(QueueFull):
        holding(capacity, "flood", 1)
    holding(capacity, "third", 3)
    with pytest.raises(QueueFull):  # 18 of 2 + 2 * 8
        holding(capacity, "fourth", 1)


@in_event_loop
async def test_requests_carry_their_client_and_its_ceiling() -> None:
    scheduler = ScriptedScheduler()
    manager = make_manager(scheduler, max_priority=3)
    await manager.generate([5], SamplingParams(), RequestOptions(priority=9))
    CURRENT_CLIENT.set(Client("key", 7))
    await manager.generate([5], SamplingParams(), RequestOptions(priority=9))
    assert [(r.client, r.priority, r.max_priority) for r in scheduler.requests] == [("", 9, 3), ("key", 9, 7)]
    manager.close()


@in_event_loop
async def test_a_text_of_more_characters_than_its_tokens_can_hold_is_refused() -> None:
    manager = make_manager(ScriptedScheduler())
    limit = manager.max_context_len * manager.tokenizer.longest_token
    with pytest.raises(TextTooLong, match=f"at most {limit}"):
        await manager.encoder.encode("a" * (limit + 1))
    with pytest.raises(ContextTooLong):
        await manager.encoder.encode_chat([{"role": "user", "content": "a" * limit}])
    manager.close()
