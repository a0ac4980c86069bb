"""Structured output of the default server: the embedded model with its own draft, over HTTP."""

from __future__ import annotations

import concurrent.futures
import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from conftest import Embedded

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Italy"]}, "size": {"type": "integer"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Name a city and its country as JSON."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
HOSTILE: list[dict[str, Any]] = [
    {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i}}}$"} for i in range(1, 4000)},
        }
    },
    {"json_schema": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(24)]}},
    {"json_schema": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}},
    {"json_schema": {"enum": ["x" * 1000 + str(i) for i in range(1000)]}},
    {"ebnf": 'root ::= "a" root'},
    {"ebnf": "root ::= r0\n" + "\n".join(f'r{i} ::= r{(i + 1) % 3000} | "y"' for i in range(3000))},
    {"regex": "a?" * 100_000},
    {"regex": "(a"},
    {"json_schema": {"not": {"type": "string"}}},
]


def chat(embedded: Embedded, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{embedded.url}/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 96, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_answer_satisfies_its_schema_whole_streamed_and_several_times(embedded: Embedded) -> None:
    whole = chat(embedded, response_format=FORMAT, temperature=0, logprobs=True, top_logprobs=3)["choices"][0]
    assert whole["finish_reason"] == "stop"
    jsonschema.validate(json.loads(whole["message"]["content"]), SCHEMA)
    assert all(entry["logprob"] <= 0 for entry in whole["logprobs"]["content"])
    body = {"messages": QUESTION, "max_tokens": 96, "response_format": FORMAT, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{embedded.url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == whole["message"]["content"]
    several = chat(embedded, response_format=FORMAT, temperature=1, seed=5, n=3)["choices"]
    for choice in several:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert any(choice["finish_reason"] == "stop" for choice in several)


def test_a_stop_string_inside_json_ends_the_text_before_it(embedded: Embedded) -> None:
    whole = chat(embedded, response_format=FORMAT, temperature=0)["choices"][0]["message"]["content"]
    cut = chat(embedded, response_format=FORMAT, temperature=0, stop=['"country"'])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == whole[: whole.index('"country"')]


def test_a_regex_holds_on_the_native_endpoint(embedded: Embedded) -> None:
    sampling = {"regex": "(yes|no), [a-z]{3,8}", "max_new_tokens": 24, "temperature": 1.0}
    answers = httpx.post(f"{embedded.url}/generate", json={"text": ["Is it?", "Or not?"], "sampling_params": sampling}, timeout=60).json()
    assert all(re.fullmatch("(yes|no), [a-z]{3,8}", answer["text"]) for answer in answers)


@pytest.mark.parametrize("fields", HOSTILE)
def test_hostile_grammars_are_refused_while_others_stream(embedded: Embedded, fields: dict[str, Any]) -> None:
    streaming = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def stream() -> dict[str, Any]:
        return httpx.post(f"{embedded.url}/v1/completions", json=streaming, timeout=60).json()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        refused = httpx.post(f"{embedded.url}/v1/completions", json={"prompt": "x", **fields}, timeout=60)
        assert refused.status_code == 400, refused.text
        assert re.search("cannot be used|must be", refused.json()["error"]["message"])
        assert running.result()["usage"]["completion_tokens"] == 24
    embedded.quiet()
