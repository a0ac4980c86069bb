"""The request fields that constrain the output, and the grammar that each of them stands for."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from front import ScriptedScheduler, front, until

from event_loop import in_event_loop
from runtime.entrypoints import generations
from runtime.entrypoints.http.body_schema import read_body
from runtime.entrypoints.native.protocol import GenerateBody
from runtime.entrypoints.openai.protocol import ChatBody, CompletionBody
from runtime.entrypoints.openai.structured import escaped
from runtime.errors import RequestError
from runtime.sampling_params import MAX_GRAMMAR_CHARS, GrammarSpec

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"type": "const_string", "value": "x"}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}}


def spec_of(fields: dict[str, Any]) -> GrammarSpec | None:
    body = read_body(ChatBody, {"messages": [{"role": "user", "content": "hi"}], **fields})
    return body.sampling(8, 0).grammar


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": NAMED}, "json_schema", TEXT),
        ({"json_schema": SCHEMA}, "json_schema", TEXT),
        ({"json_schema": TEXT}, "json_schema", TEXT),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": TEXT}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_choice": ["a.b", "c|d"]}, "regex", r"a\.b|c\|d"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "regex", "x|y"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"structural_tag": json.dumps({"format": TAG})}, "structural_tag", json.dumps({"format": TAG})),
        ({"structural_tag": {"format": TAG}}, "structural_tag", json.dumps({"format": TAG})),
        ({"structured_outputs": {"structural_tag": {"format": TAG}}}, "structural_tag", json.dumps({"format": TAG})),
    ],
)
def test_every_spelling_gives_its_grammar(fields: dict[str, Any], kind: str, text: str) -> None:
    assert spec_of(fields) == GrammarSpec(kind, text)  # type: ignore[arg-type]
    if "response_format" not in fields:
        assert read_body(CompletionBody, {"prompt": "x", **fields}).sampling(8, 0).grammar == GrammarSpec(kind, text)  # type: ignore[arg-type]
    if fields.keys() <= {"json_schema", "regex", "ebnf", "structural_tag"}:
        generate = read_body(GenerateBody, {"text": "x", "sampling_params": fields})
        assert generate.samplings[0].params().grammar == GrammarSpec(kind, text)  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", [{"format": TAG}, {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}])
def test_a_response_format_may_be_a_structural_tag(tag: dict[str, Any]) -> None:
    spec = spec_of({"response_format": {"type": "structural_tag", **tag}})
    assert spec is not None
    assert spec.kind == "structural_tag"
    assert json.loads(spec.text).items() >= tag.items()


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"regex": None}])
def test_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert spec_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex"),
        ({"regex": "a", "guided_json": {}}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ],
)
def test_wrong_constraints_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        spec_of(fields)
    assert caught.value.param == named


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"json_schema": 1}, "json_schema"),
        ({"json_schema": "x" * (MAX_GRAMMAR_CHARS + 1)}, "json_schema"),
        ({"regex": "\ud800"}, "regex"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"stop": [b"x"]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"seed": 1 << 63}, "seed"),
        ({"speculative_num_steps": 64}, "speculative_num_steps"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"n": "2"}, "n"),
    ],
)
def test_sampling_parameters_out_of_bounds_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_body(GenerateBody, {"text": "x", "sampling_params": values}).samplings[0].params()
    assert (caught.value.param or "").removeprefix("sampling_params.").partition(".")[0] == named


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": [1 << 62]}, "input_ids"),
        ({"text": "x", "rid": ""}, "rid"),
        ({"text": "x", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "x", "top_logprobs_num": 1.5}, "top_logprobs_num"),
        ({"text": "x", "top_logprobs_num": True}, "top_logprobs_num"),
    ],
)
def test_arguments_out_of_bounds_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_body(GenerateBody, fields)
    assert caught.value.param == named


def test_a_malformed_structural_tag_is_not_called_a_schema() -> None:
    with pytest.raises(RequestError, match="structural_tag must be a structural tag, as an object or as JSON text of at most"):
        read_body(GenerateBody, {"text": "x", "sampling_params": {"structural_tag": "x"}})


def test_two_constraints_are_named_in_the_refusal() -> None:
    with pytest.raises(RequestError, match=r"^json_schema and structured_outputs\.regex cannot be combined\.$"):
        spec_of({"json_schema": SCHEMA, "structured_outputs": {"regex": "a"}})


CHAT = "/v1/chat/completions"
FUNCTION = {"name": "f", "parameters": SCHEMA}


REFUSED = [
    (CHAT, {"response_format": NAMED}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": {"type": "json_object"}, "n": 2, "logprobs": True}, "response_format"),
    (CHAT, {"guided_choice": ["a"]}, "guided_choice"),
    (CHAT, {"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}, "tools"),
    (CHAT, {"functions": [FUNCTION], "function_call": {"name": "f"}}, "functions"),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "regex": "a"}, "regex"),
    ("/v1/completions", {"prompt": ["a", "b"], "json_schema": SCHEMA}, "json_schema"),
    ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.schema"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format.schema"),
]
"""Paths, fields of a body, and the name of the grammar's field."""


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_a_refused_grammar_is_the_fault_of_its_field(stream: bool) -> None:
    async with front(ScriptedScheduler(refuse="Say why."), context_length=2000) as f:
        for path, fields, named in REFUSED:
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5} if path in (CHAT, "/v1/messages") else {}
            answer = await f.post(path, {**chat, **fields, "stream": stream})
            assert answer.status_code == 400, (path, fields)
            assert f"The {named} cannot be used: Say why." in answer.text, (path, fields)
            assert path == "/v1/messages" or answer.json()["error"]["param"] == named, (path, fields)


@in_event_loop
async def test_a_stream_waits_a_limited_time_for_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "REPLY_SECONDS", 0.05)
    async with front(ScriptedScheduler(hold=0)) as f:
        asked = asyncio.create_task(f.post("/v1/completions", {"prompt": "x", "regex": "a", "stream": True}))
        await asyncio.sleep(0.2)
        await f.post("/abort_request", {"abort_all": True})
        answer = await asked
        assert (answer.status_code, answer.text.count("[DONE]")) == (200, 1)


@in_event_loop
async def test_a_client_that_leaves_before_its_grammar_is_ready_aborts_the_request() -> None:
    async with front(ScriptedScheduler(hold=0)) as f:
        asked = asyncio.create_task(f.post("/v1/completions", {"prompt": "x", "regex": "a", "stream": True}))
        await until(lambda: f.manager.open_requests == 1)
        asked.cancel()
        await until(lambda: f.manager.open_requests == 0)


def test_a_choice_is_matched_as_it_is_written() -> None:
    odd = r"a.b*c+(d)[e]{2}|f^g$h\i/j-k &l"
    assert re.fullmatch(escaped(odd), odd)
