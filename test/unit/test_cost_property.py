"""Random calls of every endpoint: none makes the server do more work than its limits allow before it is admitted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from front import ScriptedScheduler, count_tokenised, make_manager

from event_loop import in_event_loop
from runtime.entrypoints.http.body_cost import BodyCost
from runtime.entrypoints.server.server import create_app
from runtime.managers.messages import GenerateReq
from runtime.text.bounded_encoding import SLICE_CHARS

CASES = 800
CONTEXT = 256
QUEUED, CELLS, PARSE_MS = 2000, 20_000, 50
BYTES_PER_TOKEN = 1024
"""Bytes of work per token of the context that a call may cost before it is admitted; beside one slice per prompt."""

IN_PARTS = ("/v1/embeddings", "/v1/score", "/v1/rerank")
"""Endpoints that run the prompts of a call in parts, each within the limits."""

Json = dict[str, Any]


def text(rng: random.Random) -> str:
    unit = rng.choice(["x", "word ", "é", "<|im_start|>", "[{,}]", "\\", '"', " ", "\n"])
    return unit * max(1, int(10 ** rng.uniform(0, 4.6)) // len(unit))


def ids(rng: random.Random) -> list[int]:
    return [rng.randrange(259)] * int(10 ** rng.uniform(0, 4))


def prompt(rng: random.Random) -> Any:
    one = rng.choice([text, ids])
    return one(rng) if rng.random() < 0.6 else [one(rng) for _ in range(rng.choice([1, 3, 40]))]


def shape(rng: random.Random) -> Json:
    return {"n": rng.choice([1, 1, 4, 128]), "max_tokens": rng.choice([1, 16, 300]), "stream": rng.random() < 0.2}


def completion(rng: random.Random) -> Json:
    return {"prompt": prompt(rng), "echo": rng.random() < 0.5, "logprobs": rng.choice([None, 0, 5, 20]), **shape(rng)}


def chat(rng: random.Random) -> Json:
    parts = [{"type": "text", "text": text(rng)[:200]} for _ in range(rng.choice([1, 5, 500]))]
    contents = [text(rng) if rng.random() < 0.7 else parts for _ in range(rng.choice([1, 2, 30]))]
    return {"messages": [{"role": "user", "content": content} for content in contents], "logprobs": rng.random() < 0.3, **shape(rng)}


def generate(rng: random.Random) -> Json:
    sampling = {"n": rng.choice([1, 8]), "max_new_tokens": rng.choice([1, 16])}
    return {rng.choice(["text", "input_ids"]): prompt(rng), "sampling_params": sampling, "return_logprob": rng.random() < 0.5}


def nested(rng: random.Random) -> Json:
    inner: Any = []
    for _ in range(rng.choice([1, 60, 70])):
        inner = [inner]
    return {"prompt": rng.choice([inner, [[]] * rng.choice([10, 30_000]), [{}] * 20_000]), "metadata": {"a": inner}}


CALLS: dict[str, Callable[[random.Random], Json]] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/generate": generate,
    "/tokenize": lambda rng: {"prompt": rng.choice([text(rng), [text(rng)] * 3])},
    "/detokenize": lambda rng: {"tokens": ids(rng)},
    "/v1/embeddings": lambda rng: {"input": prompt(rng)},
    "/v1/score": lambda rng: {"query": text(rng), "items": [text(rng)[:9]] * rng.choice([1, 1, 1, 50, 200, 2000]), "label_token_ids": [1]},
    "/v1/rerank": lambda rng: {"query": text(rng)[:99], "documents": [text(rng)[:50]] * rng.choice([1, 50])},
    "/v1/responses": lambda rng: {"input": text(rng)},
    "/v1/messages": lambda rng: {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": text(rng)}]},
    "/abort_request": nested,
}


@in_event_loop
async def test_no_call_costs_more_than_its_limits_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised = count_tokenised(monkeypatch)
    rng, statuses = random.Random(0), set[int]()
    scheduler = ScriptedScheduler(say=lambda request: "a")
    limits = {"max_queued_tokens": QUEUED, "max_logprob_cells": CELLS, "max_parse_ms": PARSE_MS, "max_body_mib": 1}
    manager = make_manager(scheduler, **limits)
    transport = httpx.ASGITransport(create_app(manager))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        for case in range(CASES):
            path = rng.choice(list(CALLS))
            make = CALLS[path] if rng.random() < 0.95 else nested
            body = make(rng)
            raw = orjson.dumps(body)
            tokenised.clear()
            scheduler.requests.clear()
            answer = await client.post(path, content=raw)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (case, path, answer.text[:200])
            check_cost(case, path, raw, answer.status_code, tokenised, scheduler)
        assert {200, 400, 413} <= statuses
        assert manager.open_requests == 0
    manager.close()


def check_cost(case: int, path: str, raw: bytes, status: int, tokenised: list[int], scheduler: ScriptedScheduler) -> None:
    where, cost = (case, path, status), BodyCost()
    cost.feed(raw)
    if cost.milliseconds > PARSE_MS or cost.bytes > 1 << 20:
        assert status == 413, where
    if status == 413:
        assert not tokenised, where
        assert not scheduler.requests, where
    # Besides the prompts that fit, a call tokenises little: a few slices of the one that does not.
    assert sum(tokenised) <= BYTES_PER_TOKEN * CONTEXT + QUEUED * 64 + 4 * SLICE_CHARS, where
    prompts = {id(request.input_ids): request for request in scheduler.requests}
    if path not in IN_PARTS:
        assert sum(len(request.input_ids) for request in prompts.values()) <= QUEUED, where
    assert path in IN_PARTS or sum(map(cells_of, scheduler.requests)) <= CELLS, where


def cells_of(request: GenerateReq) -> int:
    """Log-probabilities that the answer to a request may hold."""
    prompt_tokens = len(request.input_ids) if request.prompt_logprobs else 0
    new_tokens = request.sampling.max_new_tokens if request.top_logprobs >= 0 else 0
    return (prompt_tokens + new_tokens) * (1 + max(request.top_logprobs, 0))
