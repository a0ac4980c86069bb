"""The conversation of clients that need other versions of the same packages: python_clients.py CLIENT URL."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any, Union

import client_script as script
from client_script import ANSWER, ASK, CALLS, CAPITAL, LONG, MODEL, THOUGHT, WHO, Person, calls_of, user
from pydantic import BaseModel


def talk_litellm(url: str) -> None:
    import litellm

    known: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    structured = litellm.completion(**known, messages=[*script.person_turns(), user(WHO)], response_format=Person, max_tokens=60)
    assert Person.model_validate_json(structured.choices[0].message.content).name
    called: dict[str, Any] = {"messages": [*script.tool_turns(), user(ASK)], "tools": script.tools(), "max_tokens": 80, **known}
    streamed: Any = litellm.stream_chunk_builder(list(litellm.completion(**called, stream=True)))
    for answer in (litellm.completion(**called), streamed):
        assert calls_of((call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls) == CALLS
    thought = litellm.completion(**known, messages=[*script.thought_turns(), user(CAPITAL)], max_tokens=40).choices[0].message
    assert (thought.reasoning_content, thought.content) == (THOUGHT, ANSWER)
    other = {**known, "model": f"anthropic/{MODEL}", "api_base": url}
    assert "Paris" in litellm.completion(**other, messages=[user(CAPITAL)], max_tokens=20).choices[0].message.content
    left = litellm.completion(**known, messages=[user(LONG)], stream=True)
    assert len(list(islice(left, 3))) == 3


class get_weather(BaseModel):
    """The weather in a city"""

    city: str


class get_time(BaseModel):
    """The time in a city"""

    city: str


def talk_instructor(url: str) -> None:
    import instructor
    import openai

    raw = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 80}
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
    people: Any = [*script.person_turns(), user(WHO)]
    whole = client.create(response_model=Person, messages=people, **ask)
    *_, last = client.create_partial(response_model=Person, messages=people, **ask)
    assert (last.name, last.age) == (whole.name, whole.age)
    parallel: Any = instructor.from_openai(raw, mode=instructor.Mode.PARALLEL_TOOLS)
    tools = Iterable[Union[get_weather, get_time]]  # noqa: UP007  (instructor reads no other form)
    called = list(parallel.create(response_model=tools, messages=[*script.tool_turns(), user(ASK)], **ask))
    assert {(type(one).__name__, one.city) for one in called} == CALLS
    _, completion = client.create_with_completion(response_model=Person, messages=[*script.thought_people(), user(WHO)], **ask)
    assert "France" in completion.choices[0].message.reasoning_content
    next(iter(client.create_partial(response_model=Person, messages=people, **ask)))  # and leave


if __name__ == "__main__":
    {"litellm": talk_litellm, "instructor": talk_instructor}[sys.argv[1]](sys.argv[2])
