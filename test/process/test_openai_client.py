"""The official OpenAI client against the default server, unchanged, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from conftest import Embedded
from event_loop import in_event_loop

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(embedded: Embedded) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_the_right_answer_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


@in_event_loop
async def test_the_right_answer_async_and_many_at_once(embedded: Embedded, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0) as client:
        asked = [client.chat.completions.create(model=model, messages=QUESTION, temperature=0) for _ in range(6)]
        assert {(await answer).choices[0].message.content for answer in asyncio.as_completed(asked)} == {ANSWER}
        stream = await client.chat.completions.create(model=model, messages=QUESTION, temperature=0, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


def test_completions_with_stop_seed_n_and_logprobs(client: openai.OpenAI, model: str) -> None:
    def ask(**options: Any) -> Any:
        return client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, **options)

    assert "Paris" in ask(temperature=0).choices[0].text
    stopped = ask(temperature=0, stop=["Paris"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert "Paris" not in stopped.text
    first, second = (ask(temperature=1.0, seed=7, n=2) for _ in range(2))
    assert [one.text for one in first.choices] == [one.text for one in second.choices]
    assert first.choices[0].text != first.choices[1].text
    scored = ask(temperature=0, logprobs=3).choices[0].logprobs
    assert "".join(scored.tokens) == ask(temperature=0).choices[0].text
    for token, chosen, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True):
        assert top[token] == pytest.approx(chosen)
        assert chosen == max(top.values())
        assert len(top) == 3


def test_echo_with_logprobs_scores_the_likely_continuation_higher(client: openai.OpenAI, model: str) -> None:
    def score(continuation: str) -> float:
        choice = client.completions.create(
            model=model, prompt="The capital of France is" + continuation, max_tokens=1, echo=True, logprobs=1, temperature=0
        ).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        return sum(choice.logprobs.token_logprobs[1:-1])

    assert score(" Paris") > score(" banana")


def test_chat_logprobs_spell_the_answer(client: openai.OpenAI, model: str) -> None:
    choice = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert b"".join(bytes(one.bytes or []) for one in entries).decode().startswith(ANSWER)
    assert all(one.top_logprobs[0].token == one.token for one in entries)


def test_the_client_raises_its_own_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=QUESTION, max_completion_tokens=10**6)
    assert caught.value.param == "max_completion_tokens"
    with pytest.raises(openai.BadRequestError, match="modalities"):
        client.chat.completions.create(model=model, messages=QUESTION, modalities=["text", "audio"])


def test_leaving_a_stream_frees_its_memory(client: openai.OpenAI, model: str, embedded: Embedded) -> None:
    stream = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert embedded.quiet(5)["num_running_reqs"] == 0
