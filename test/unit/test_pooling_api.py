"""Embeddings, scores and ranks over a real socket, with a scripted scheduler."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from dataclasses import replace

import pytest
from front import ScriptedScheduler, front, logprob_of, until

from event_loop import in_event_loop
from runtime.entrypoints.pooling.endpoints import CONTEXT
from runtime.entrypoints.pooling.protocol import EmbeddingList, Rank, Scores
from runtime.pooling import Pooling


def length(vector: list[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


@in_event_loop
async def test_embeddings_have_openais_form_and_length_1() -> None:
    async with front() as f:
        answer = (await f.post("/v1/embeddings", {"input": ["ab", "c"], "model": "tiny"})).json()
        EmbeddingList.model_validate(answer)
        assert [r.input_ids for r in f.scheduler.requests] == [[97, 98], [99]]
        assert {r.pooling for r in f.scheduler.requests} == {Pooling(kind="mean")}
        assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        assert [each["index"] for each in answer["data"]] == [0, 1]
        first = answer["data"][0]["embedding"]
        assert first[:2] == pytest.approx([97 / length([97, 98]), 98 / length([97, 98])])
        ids = (await f.post("/v1/embeddings", {"input": [97, 98]})).json()
        assert ids["data"][0]["embedding"] == first
        lists = (await f.post("/v1/embeddings", {"input": [[97, 98], [99]]})).json()
        assert lists["data"] == answer["data"]


@in_event_loop
async def test_base64_holds_the_same_float32_values() -> None:
    async with front() as f:
        body = {"input": "abc", "dimensions": 2}
        plain = (await f.post("/v1/embeddings", body)).json()["data"][0]["embedding"]
        coded = (await f.post("/v1/embeddings", {**body, "encoding_format": "base64"})).json()["data"][0]["embedding"]
        assert list(struct.unpack("<2f", base64.b64decode(coded))) == pytest.approx(plain)
        assert (len(plain), length(plain)) == (2, pytest.approx(1.0))


@in_event_loop
async def test_many_inputs_wait_their_turn_and_keep_their_order() -> None:
    async with front(max_queued_requests=1) as f:
        answer = (await f.post("/v1/embeddings", {"input": [[i] for i in range(200)], "dimensions": 1})).json()
        assert [each["index"] for each in answer["data"]] == list(range(200))
        assert [r.input_ids for r in f.scheduler.requests] == [[i] for i in range(200)]


@in_event_loop
async def test_the_last_token_can_be_pooled() -> None:
    async with front(embedding_pooling="last") as f:
        await f.post("/v1/embeddings", {"input": "ab"})
        assert f.scheduler.requests[0].pooling == Pooling(kind="last")


@pytest.mark.parametrize("item_first", [False, True])
@in_event_loop
async def test_scores_are_label_probabilities_of_query_and_item(item_first: bool) -> None:
    async with front() as f:
        body = {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 6], "item_first": item_first}
        answer = (await f.post("/v1/score", body)).json()
        Scores.model_validate(answer)
        raw = [math.exp(logprob_of(5)), math.exp(logprob_of(6))]
        assert answer["scores"] == [pytest.approx(raw)] * 2
        shares = (await f.post("/v1/score", {**body, "apply_softmax": True})).json()["scores"]
        assert shares[0] == pytest.approx([value / sum(raw) for value in raw])
        assert [r.input_ids for r in f.scheduler.requests[:2]] == ([[97, 113], [98, 113]] if item_first else [[113, 97], [113, 98]])
        sharp = (await f.post("/v1/score", {**body, "apply_softmax": True, "temperature": 0.5})).json()["scores"]
        assert sharp[0] == pytest.approx([value**2 / sum(raw**2 for raw in shares[0]) for value in shares[0]])
        assert (await f.post("/v1/score", {**body, "temperature": 0.5})).json()["error"]["param"] == "temperature"
        one = (await f.post("/v1/score", {**body, "query": [113], "items": [[97]]})).json()
        assert one["scores"] == answer["scores"][:1]
        single = (await f.post("/v1/score", {**body, "items": "a"})).json()
        assert single["scores"] == answer["scores"][:1]


@in_event_loop
async def test_documents_are_ranked_by_the_likelihood_of_the_query() -> None:
    async with front() as f:
        body = {"query": "hi", "documents": ["a", "bb", "ccc"]}
        ranks = (await f.post("/v1/rerank", body)).json()
        assert [Rank.model_validate(rank).index for rank in ranks] == [0, 1, 2]
        mean = sum(logprob_of(token) for token in b" hi") / 3
        assert [rank["score"] for rank in ranks] == [pytest.approx(math.exp(mean))] * 3
        asked = f.scheduler.requests[1]
        assert bytes(asked.input_ids).decode() == CONTEXT.format(document="bb") + " hi"
        assert ranks[1]["document"] == "bb"
        assert ranks[1]["meta_info"] == {"prompt_tokens": len(asked.input_ids)}
        assert (await f.post("/rerank", body)).json() == ranks
        short = (await f.post("/v1/rerank", {**body, "top_n": 2, "return_documents": False})).json()
        assert [set(rank) for rank in short] == [{"index", "score", "meta_info"}] * 2


@in_event_loop
async def test_a_checkpoint_without_a_head_gives_embeddings_only() -> None:
    async with front() as f:
        f.manager.model_config = replace(f.manager.model_config, no_head=True)
        assert (await f.post("/v1/embeddings", {"input": "a"})).status_code == 200
        assert not (await f.client.get("/get_model_info")).json()["is_generation"]
        assert (await f.client.get("/health_generate")).status_code == 200
        score = {"query": "q", "items": ["a"], "label_token_ids": [1]}
        paths = {"/v1/completions": {"prompt": "a"}, "/generate": {"text": "a"}, "/v1/score": score}
        for path, body in (paths | {"/v1/rerank": {"query": "q", "documents": ["a"]}}).items():
            answer = await f.post(path, body)
            assert answer.status_code == 400
            assert "The checkpoint has no LM head" in answer.text


WRONG = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": "x" * 300}, "input"),
    ("/v1/embeddings", {"input": [999]}, "input"),
    ("/v1/embeddings", {"input": "x", "dimensions": 65}, "dimensions"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/score", {"query": "q", "items": ["a"]}, "label_token_ids"),
    ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": []}, "label_token_ids"),
    ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [999]}, "label_token_ids"),
    ("/v1/score", {"query": "q", "items": [[1]], "label_token_ids": [1]}, "items"),
    ("/v1/score", {"query": "", "items": [""], "label_token_ids": [1]}, "items"),
    ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "q", "documents": ["x" * 300]}, "documents"),
    ("/v1/rerank", {"query": "q", "documents": ["x"], "top_n": 0}, "top_n"),
]
"""Paths and bodies, and the field that each refusal names."""


@in_event_loop
async def test_wrong_bodies_are_refused_by_field() -> None:
    async with front() as f:
        for path, body, param in WRONG:
            answer = await f.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, body, answer.text)
            assert await f.fine(), (path, body)


@in_event_loop
async def test_another_model_is_not_found() -> None:
    async with front() as f:
        assert (await f.post("/v1/embeddings", {"input": "x", "model": "other"})).status_code == 404


@in_event_loop
async def test_a_client_that_leaves_ends_its_prompts() -> None:
    async with front(ScriptedScheduler(hold=0)) as f:
        asking = asyncio.create_task(f.post("/v1/embeddings", {"input": ["a", "b"]}))
        await until(lambda: len(f.scheduler.requests) == 2)
        asking.cancel()
        await until(lambda: len(f.scheduler.aborted) == 2)
        assert f.manager.open_requests == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["ab", "c"]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1, 2]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
@in_event_loop
async def test_an_aborted_call_is_an_error_and_no_empty_result(path: str, body: dict[str, object]) -> None:
    async with front(ScriptedScheduler(hold=0)) as f:
        call = asyncio.create_task(f.post(path, body))
        await until(lambda: bool(f.scheduler.requests))
        assert (await f.post("/abort_request", {"abort_all": True})).status_code == 200
        answer = await call
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_aborted")
