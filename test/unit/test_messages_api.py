"""/v1/messages over a real socket with a scripted scheduler, and its conversions alone."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from front import ScriptedScheduler, front, until
from pydantic import TypeAdapter

from event_loop import in_event_loop
from runtime.entrypoints.anthropic.conversion import chat_fields, messages
from runtime.entrypoints.anthropic.protocol import AnthropicMessage, MessagesBody
from runtime.entrypoints.anthropic.writer import MessageWriter
from runtime.entrypoints.http.responses import AnthropicError, json_response
from runtime.entrypoints.openai.chat_updates import ChatFinish, ChatUpdate
from runtime.entrypoints.openai.usage import TokenCounts
from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

PATH = "/v1/messages"
TEXT = "Hello, world"
HI = [{"role": "user", "content": "hi"}]


@functools.cache
def official_forms() -> tuple[type[Any], TypeAdapter[Any]]:
    """Anthropic's own types of a message and of an event; every process that runs tests would take seconds to import them."""
    from anthropic.types import Message, RawMessageStreamEvent

    return Message, TypeAdapter(RawMessageStreamEvent)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each says its type twice."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# ---- answers


@in_event_loop
async def test_a_message_has_anthropics_form_and_counts() -> None:
    async with front() as f:
        answer = (await f.post(PATH, {"max_tokens": 50, "messages": HI, "system": "s", "model": "tiny"})).json()
        prompt = f.scheduler.requests[0].input_ids
        assert bytes(t for t in prompt if t < 256).decode() == "system\ns\nuser\nhi\nassistant\n"
    AnthropicMessage.model_validate(answer)
    assert official_forms()[0].model_validate(answer).content[0].to_dict() == {"type": "text", "text": TEXT}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {
        "input_tokens": len(prompt) - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 13,
    }


@in_event_loop
async def test_a_stream_has_anthropics_events_in_order() -> None:
    async with front() as f:
        answer = await f.post(PATH, {"max_tokens": 50, "messages": HI, "stream": True})
        events = events_of(answer.text)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == TEXT
    assert kinds.count("content_block_delta") > 3
    for event in events:
        if event["type"] != "ping":
            official_forms()[1].validate_python(event)
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@in_event_loop
async def test_the_limit_and_the_stop_sequence_are_reasons_to_stop() -> None:
    async with front() as f:
        answer = (await f.post(PATH, {"max_tokens": 3, "messages": HI, "stop_sequences": ["x", "y"], "top_k": 5})).json()
        assert answer["stop_reason"] == "max_tokens"
        sampling = f.scheduler.requests[0].sampling
        assert (sampling.stop, sampling.top_k) == (("x", "y"), 5)
        # Clients of large models ask for more than fits here; the context is the limit.
        assert (await f.post(PATH, {"max_tokens": 32000, "messages": HI})).json()["stop_reason"] == "end_turn"
    writer = MessageWriter("msg_1", "tiny", 3)
    writer.update(ChatUpdate(0, [], [], finish=ChatFinish("stop", "y")))
    writer.end(TokenCounts(3, 1, 0))
    assert (writer.message["stop_reason"], writer.message["stop_sequence"]) == ("stop_sequence", "y")


@in_event_loop
async def test_a_last_message_of_the_assistant_is_continued() -> None:
    async with front() as f:
        await f.post(PATH, {"max_tokens": 3, "messages": [*HI, {"role": "assistant", "content": "We"}]})
        assert bytes(t for t in f.scheduler.requests[0].input_ids if t < 256).decode() == "user\nhi\nassistant\nWe"


@in_event_loop
async def test_tokens_are_counted_without_generating() -> None:
    async with front() as f:
        answer = (await f.post(f"{PATH}/count_tokens", {"messages": HI, "model": "tiny"})).json()
        assert f.scheduler.requests == []
        await f.post(PATH, {"max_tokens": 3, "messages": HI})
        assert answer == {"input_tokens": len(f.scheduler.requests[0].input_ids)}


@in_event_loop
async def test_a_failure_in_a_stream_is_an_error_event() -> None:
    async with front(ScriptedScheduler(fail=3)) as f:
        last = events_of((await f.post(PATH, {"max_tokens": 50, "messages": HI, "stream": True})).text)[-1]
        assert last == {"type": "error", "error": {"type": "api_error", "message": "the forward step of this request failed"}}


@in_event_loop
async def test_a_client_that_leaves_ends_its_message() -> None:
    async with front(ScriptedScheduler(hold=2)) as f:
        async with f.client.stream("POST", PATH, json={"max_tokens": 50, "messages": HI, "stream": True}) as answer:
            await answer.aiter_lines().__anext__()
        await until(lambda: f.manager.open_requests == 0)


# ---- conversions


def test_blocks_become_the_messages_of_a_chat() -> None:
    raw: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "bad", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    body = MessagesBody.model_validate({"max_tokens": 5, "messages": raw, "system": [{"type": "text", "text": "s"}]})
    calls = [("t1", "f", '{"x": "é"}'), ("t2", "g", "{}")]
    assert messages(body) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": name, "type": "function", "function": {"name": f, "arguments": text}} for name, f, text in calls],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: bad"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_and_choices_become_those_of_a_chat(choice: dict[str, Any], expected: Any) -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    given = {"max_tokens": 5, "messages": HI, "tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    fields = chat_fields(MessagesBody.model_validate(given), 100)
    assert fields["tools"] == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (expected, False)


def test_thinking_and_formats_become_those_of_a_chat() -> None:
    def fields(**more: Any) -> dict[str, Any]:
        return chat_fields(MessagesBody.model_validate({"max_tokens": 5, "messages": HI, **more}), 100)

    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert fields()["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert fields(thinking=thinking)["chat_template_kwargs"] == {
        "enable_thinking": True,
        "thinking": True,
    }
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    made = fields(output_config=config)
    assert made["reasoning_effort"] == "high"
    assert made["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def write(*deltas: Delta, finish: ChatFinish) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message and the events of an answer, one delta per update."""
    writer = MessageWriter("msg_1", "tiny", 5)
    events = writer.start()
    for delta in deltas:
        events += writer.update(ChatUpdate(0, [delta], []))
    events += writer.update(ChatUpdate(0, [], [], finish=finish))
    events += writer.end(TokenCounts(5, 7, 2))
    return json.loads(json_response(writer.message).body), events


def test_thinking_text_and_tools_are_blocks_of_their_own() -> None:
    message, events = write(
        Reasoning("th"), Reasoning("ink"), Content("so"), CallStart(0, "c1", "f"), CallArguments(0, '{"a"'), CallArguments(0, ":1}"),
        CallStart(1, "c2", "g"), CallArguments(1, "{}"), finish=ChatFinish("tool_calls"),
    )  # fmt: skip
    assert message["content"] == [
        {"type": "thinking", "thinking": "think", "signature": ""},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    AnthropicMessage.model_validate(message)
    for event in events:
        if event["type"] != "ping":
            official_forms()[1].validate_python(event)
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta" and event["index"] == 0]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta"], "a signature ends the thinking"
    parts = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 2]
    assert "".join(part["partial_json"] for part in parts) == '{"a":1}'
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    started = next(event for event in events if event["type"] == "content_block_start" and event["index"] == 2)
    assert started["content_block"]["input"] == {}


def test_a_call_that_was_cut_off_has_no_input() -> None:
    message, _ = write(CallStart(0, "c1", "f"), CallArguments(0, '{"a"'), finish=ChatFinish("length"))
    assert (message["content"][0]["input"], message["stop_reason"]) == ({}, "max_tokens")


@pytest.mark.parametrize("value", [10**30, "\ud83d"], ids=["a long number", "half of a surrogate pair"])
def test_arguments_that_only_json_can_hold_become_the_input(value: Any) -> None:
    message, _ = write(CallStart(0, "c1", "f"), CallArguments(0, json.dumps({"a": value})), finish=ChatFinish("tool_calls"))
    assert message["content"][0]["input"] == {"a": value}


def test_an_aborted_message_has_no_reason_to_stop() -> None:
    message, events = write(Content("a"), finish=ChatFinish("abort"))
    assert message["stop_reason"] is None
    assert events[-1]["type"] == "message_stop"


# ---- errors and keys


WRONG = [
    ({"messages": HI}, "max_tokens is required"),
    ({"max_tokens": 5}, "messages is required"),
    ({"max_tokens": 5, "messages": []}, "messages must be"),
    ({"max_tokens": 5, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"max_tokens": 5, "messages": HI, "system": [{"type": "tool_result", "text": "x"}]}, "system[0].type"),
    ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, '"image" is not supported'),
    ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is required"),
    ({"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 300}]}, "Prompt is too long."),
    ({"max_tokens": 5, "messages": HI, "temperature": 1.5}, "temperature must be a number between 0 and 1"),
    (
        {"max_tokens": 5, "messages": HI, "tools": [{"type": "bash_20250124", "name": "bash"}]},
        'tools[0].type "bash_20250124" is not supported; send tools with an input_schema.',
    ),
    ({"max_tokens": 5, "messages": HI, "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"max_tokens": 5, "messages": HI, "tool_choice": {"type": "any"}}, "tool_choice requires tools"),
    ({"max_tokens": 5, "messages": HI, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice requires tools"),
    ({"max_tokens": 5, "messages": HI, "output_format": {"type": "json_schema", "schema": {}}}, "send output_config.format"),
    ({"max_tokens": 5, "messages": HI, "mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
]
"""Bodies, and words of each refusal."""


@in_event_loop
async def test_wrong_requests_are_refused_in_anthropics_form() -> None:
    async with front() as f:
        for body, words in WRONG:
            answer = await f.post(PATH, body)
            assert answer.status_code == 400, body
            error = AnthropicError.model_validate(answer.json()).error
            assert error.type == "invalid_request_error", body
            assert words in error.message, body
            assert await f.fine(), body


@in_event_loop
async def test_other_errors_have_anthropics_form_too() -> None:
    async with front() as f:
        answers = {
            "not_found_error": [
                await f.post(PATH, {"max_tokens": 5, "messages": HI, "model": "other"}),
                await f.post(PATH + "/batches", {}),
            ],
            "permission_error": [await f.client.post(PATH, json={}, headers={"origin": "https://evil.example"})],
            "invalid_request_error": [await f.client.get(PATH), await f.client.post(PATH, content=b"{")],
        }
        f.manager.health.draining = True
        answers["overloaded_error"] = [await f.post(PATH, {"max_tokens": 5, "messages": HI})]
    for kind, each in answers.items():
        assert {AnthropicError.model_validate(answer.json()).error.type for answer in each} == {kind}


@in_event_loop
async def test_an_answer_names_its_request_as_anthropics_do() -> None:
    async with front() as f:
        for body in ({"max_tokens": 5, "messages": HI}, {}):
            headers = (await f.post(PATH, body)).headers
            assert headers["request-id"] == headers["x-request-id"]


@in_event_loop
async def test_the_key_may_come_as_x_api_key() -> None:
    async with front(api_key="k") as f:
        body = {"max_tokens": 5, "messages": HI}
        for headers, status in (({"x-api-key": "k"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)):
            f.client.headers.pop("authorization", None)
            answer = await f.post(PATH, body, headers=headers)
            assert answer.status_code == status
            assert status == 200 or AnthropicError.model_validate(answer.json()).error.type == "authentication_error"
        models = await f.client.get("/v1/models", headers={"x-api-key": "k"})
        assert models.status_code == 200
