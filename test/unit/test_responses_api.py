"""/v1/responses over a real socket with a scripted scheduler, and its conversions alone."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from front import Front, ScriptedScheduler, front, until
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from event_loop import in_event_loop
from runtime.entrypoints.openai.answer_reader import AnswerReader
from runtime.entrypoints.openai.chat_updates import ChatFinish, ChatUpdate
from runtime.entrypoints.openai.response_chat import messages, without_oldest
from runtime.entrypoints.openai.response_protocol import InputItem, ResponseObject
from runtime.entrypoints.openai.response_store import ResponseNotFound, ResponseStore, StoredResponse, size_of
from runtime.entrypoints.openai.response_writer import ResponseWriter
from runtime.entrypoints.openai.responses import _with_id
from runtime.entrypoints.openai.usage import TokenCounts
from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

PATH = "/v1/responses"
TEXT = "Hello, world"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def prompt_of(f: Front, index: int = -1) -> str:
    """A prompt that the scheduler got, with its control tokens as letters."""
    names = {256: "<", 257: ">", 258: "|"}
    return "".join(names.get(token) or chr(token) for token in f.scheduler.requests[index].input_ids)


async def stream(f: Front, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each says its type twice."""
    answer = await f.post(PATH, {**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# ---- creating


@in_event_loop
async def test_a_response_has_openais_form_and_counts() -> None:
    async with front() as f:
        body = {"input": "hi", "instructions": "be kind", "metadata": {"k": "v"}, "max_output_tokens": 50, "temperature": 0.5}
        answer = (await f.post(PATH, body)).json()
        assert prompt_of(f) == "<system\nbe kind>\n<user\nhi>\n<assistant\n"
        sampling = f.scheduler.requests[0].sampling
        assert (sampling.max_new_tokens, sampling.temperature) == (50, 0.5)
    ResponseObject.model_validate(answer)
    read = Response.model_validate(answer)
    assert (read.output_text, read.status, read.metadata, read.instructions) == (TEXT, "completed", {"k": "v"}, "be kind")
    assert answer["usage"] == {
        "input_tokens": len("<system\nbe kind>\n<user\nhi>\n<assistant\n"),
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("<system\nbe kind>\n<user\nhi>\n<assistant\n") + 13,
    }


@in_event_loop
async def test_a_cut_answer_is_incomplete() -> None:
    async with front() as f:
        answer = (await f.post(PATH, {"input": "hi", "max_output_tokens": 5})).json()
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert answer["output"][0]["status"] == "incomplete"
        assert (await stream(f, {"input": "hi", "max_output_tokens": 5}))[-1]["type"] == "response.incomplete"


@in_event_loop
async def test_a_stream_tells_of_every_part_and_ends_with_the_whole() -> None:
    async with front() as f:
        events = await stream(f, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]})
        for event in events:
            EVENT.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"] for event in events]
        assert kinds[:4] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
        ]  # fmt: skip
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
        ]  # fmt: skip
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == TEXT
        assert len(deltas) > 3
        last = events[-1]["response"]
        assert Response.model_validate(last).output_text == TEXT
        assert events[0]["response"]["output"] == []
        assert (await f.client.get(f"{PATH}/{last['id']}")).json() == last


@in_event_loop
async def test_log_probabilities_come_with_the_text() -> None:
    async with front() as f:
        body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
        (item,) = (await f.post(PATH, body)).json()["output"]
        (part,) = item["content"]
        assert [(one["token"], len(one["top_logprobs"])) for one in part["logprobs"]] == [("H", 2), ("e", 2), ("l", 2)]
        events = await stream(f, body)
        found = [one["token"] for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
        assert found == ["H", "e", "l"]


@pytest.mark.parametrize("bursts", [False, True])
@in_event_loop
async def test_log_probabilities_are_those_of_the_text_alone(bursts: bool) -> None:
    scheduler = ScriptedScheduler(say=lambda request: "<think>\nHm.</think>\n\nYes.", bursts=bursts)
    async with front(scheduler, reasoning_parser="qwen3") as f:
        body = {"input": "hi", "include": ["message.output_text.logprobs"]}
        whole = (await f.post(PATH, body)).json()["output"]
        streamed = (await stream(f, body))[-1]["response"]["output"]
        for output in (whole, streamed):
            reasoning, message = (item["content"][0] for item in output)
            assert (reasoning["text"], message["text"]) == ("Hm.", "Yes.")
            assert [one["token"] for one in message["logprobs"]] == ["Y", "e", "s", ".", "<|im_end|>"]


@in_event_loop
async def test_a_failure_in_a_stream_ends_it_with_an_error() -> None:
    async with front(ScriptedScheduler(fail=3)) as f:
        *_, error, last = await stream(f, {"input": "hi"})
        assert (error["type"], last["type"]) == ("error", "response.failed")
        assert last["response"]["status"] == "failed"
        assert error["message"] == last["response"]["error"]["message"]
        for event in (error, last):
            EVENT.validate_python(event)


# ---- the store


@in_event_loop
async def test_a_response_is_continued_retrieved_and_deleted() -> None:
    async with front() as f:
        first = (await f.post(PATH, {"input": "a", "instructions": "x"})).json()
        second = (await f.post(PATH, {"input": "b", "previous_response_id": first["id"]})).json()
        assert prompt_of(f) == f"<user\na>\n<assistant\n{TEXT}>\n<user\nb>\n<assistant\n"
        assert second["previous_response_id"] == first["id"]
        one = f"{PATH}/{first['id']}"
        assert (await f.client.get(one)).json() == first
        assert (await f.client.delete(one)).json() == {"id": first["id"], "object": "response", "deleted": True}
        for answer in (await f.client.get(one), await f.client.delete(one), await f.client.get(one + "/input_items")):
            assert answer.status_code == 404
        third = await f.post(PATH, {"input": "c", "previous_response_id": second["id"]})
        assert third.status_code == 200
        assert prompt_of(f).count(TEXT) == 2  # what a deleted response said is still part of the later conversation
        lost = await f.post(PATH, {"input": "b", "previous_response_id": first["id"]})
        assert (lost.status_code, lost.json()["error"]["code"]) == (400, "previous_response_not_found")


@in_event_loop
async def test_store_false_keeps_nothing() -> None:
    async with front() as f:
        answer = (await f.post(PATH, {"input": "a", "store": False})).json()
        assert answer["store"] is False
        assert (await f.client.get(f"{PATH}/{answer['id']}")).status_code == 404


@in_event_loop
async def test_input_items_are_listed_in_pages() -> None:
    async with front() as f:
        items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        one = (await f.post(PATH, {"input": items})).json()["id"]
        path = f"{PATH}/{one}/input_items"
        page = (await f.client.get(path, params={"limit": 2})).json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["c", "b"]
        assert [item["content"][0]["type"] for item in page["data"]] == ["input_text", "output_text"]
        assert page["has_more"]
        rest = (await f.client.get(path, params={"after": page["last_id"]})).json()
        assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (["a"], False)
        whole = (await f.client.get(path, params={"order": "asc"})).json()
        assert [item["content"][0]["text"] for item in whole["data"]] == ["a", "b", "c"]
        for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "x"}):
            assert (await f.client.get(path, params=query)).status_code == 400
        assert (await f.client.get(f"{PATH}/{one}", params={"stream": True})).status_code == 400


@in_event_loop
async def test_a_running_response_can_be_cancelled() -> None:
    async with front(ScriptedScheduler(hold=4)) as f:
        asking = asyncio.create_task(f.post(PATH, {"input": "a"}))
        streaming = asyncio.create_task(stream(f, {"input": "b"}))
        await until(lambda: len(f.scheduler.requests) == 2)
        f.manager.abort(all=True)
        answer = (await asking).json()
        assert answer["status"] == "cancelled"
        last = (await streaming)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        assert (await f.post(f"{PATH}/{answer['id']}/cancel")).json() == answer, "cancelling twice changes nothing"
        assert (await f.post(f"{PATH}/resp_x/cancel")).status_code == 404


@in_event_loop
async def test_cancel_ends_a_stream_by_its_id() -> None:
    async with (
        front(ScriptedScheduler(hold=4)) as f,
        f.client.stream("POST", PATH, json={"input": "a", "stream": True}) as answer,
    ):
        lines = answer.aiter_lines()
        name = None
        async for line in lines:
            if line.startswith("data: ") and name is None:
                name = json.loads(line.removeprefix("data: "))["response"]["id"]
                assert (await f.client.get(f"{PATH}/{name}")).json()["status"] == "in_progress"
                assert (await f.post(f"{PATH}/{name}/cancel")).json()["status"] == "cancelled"
        assert f.scheduler.aborted
        assert (await f.client.get(f"{PATH}/{name}")).json()["status"] == "cancelled"


@in_event_loop
async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    async with front(ScriptedScheduler(hold=2)) as f:
        async with f.client.stream("POST", PATH, json={"input": "a", "stream": True}) as answer:
            data = next(line for line in [line async for line in _until_data(answer)])
            name = json.loads(data.removeprefix("data: "))["response"]["id"]
        await until(lambda: f.manager.open_requests == 0)
        assert (await f.client.get(f"{PATH}/{name}")).status_code == 404


async def _until_data(answer: Any) -> AsyncIterator[str]:
    """The first data line of a stream."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line
            return


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    def stored(name: str, size: int) -> StoredResponse:
        return StoredResponse({"id": name, "output": []}, (), (), size)

    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abc":
        store.add(stored(name, 10))
    store.get("a")
    store.add(stored("d", 10))
    with pytest.raises(ResponseNotFound):
        store.get("b")
    store.add(stored("e", 85))
    assert len(store) == 2
    assert store.get("d").size == 10
    store.remove("e")
    store.add(stored("f", 1000))
    assert len(store) == 0
    store.add(stored("g", 100))
    assert len(store) == 1


def test_the_store_counts_the_memory_of_many_small_items() -> None:
    count = 2000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    items = [InputItem.model_validate({"role": "user", "content": "a"}) for _ in range(count)]
    given = [_with_id(item) for item in items]
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert size_of({"output": []}, given) >= held


@in_event_loop
async def test_a_fault_in_a_stream_fails_the_response_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, update: object) -> None:
        raise RuntimeError("a secret")

    async with front() as f:
        monkeypatch.setattr(AnswerReader, "read", broken)
        answer = await f.post(PATH, {"input": "hi", "stream": True})
        assert "event: response.failed" in answer.text
        assert "secret" not in answer.text
        await until(lambda: f.manager.open_requests == 0)


# ---- conversions


def test_items_become_the_messages_of_a_chat() -> None:
    raw: list[dict[str, Any]] = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "think"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "lost"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}]},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "again"},
    ]
    calls = [("c1", "f", "{}"), ("c2", "g", '{"x": 1}')]
    made = [{"id": name, "type": "function", "function": {"name": f, "arguments": text}} for name, f, text in calls]
    assert messages([InputItem.model_validate(item) for item in raw], "i") == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "reasoning_content": "think", "content": "so", "tool_calls": made},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "reasoning_content": "sum", "content": "done"},
        {"role": "assistant", "content": "again"},
    ]


def test_dropping_the_oldest_items_keeps_system_messages_and_whole_calls() -> None:
    raw: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"role": "user", "content": "b"},
    ]
    items = [InputItem.model_validate(item) for item in raw]
    assert [item.type for item in without_oldest(items, 1)] == ["message", "function_call", "function_call_output", "message"]
    assert [item.content for item in without_oldest(items, 2)] == ["s", "b"]


@in_event_loop
async def test_truncation_auto_drops_just_enough_of_the_oldest_items() -> None:
    async with front() as f:
        items = [{"role": "user", "content": str(i) * 60} for i in range(6)]
        assert (await f.post(PATH, {"input": items})).json()["error"]["param"] == "input"
        answer = await f.post(PATH, {"input": items, "instructions": "I", "truncation": "auto"})
        assert answer.status_code == 200
        assert prompt_of(f) == "<system\nI>\n" + "".join(f"<user\n{str(i) * 60}>\n" for i in (3, 4, 5)) + "<assistant\n"
        far_too_long = [items[0], {"role": "user", "content": "x" * 20000}, *items[1:4]]
        assert (await f.post(PATH, {"input": far_too_long, "truncation": "auto"})).status_code == 200
        assert prompt_of(f) == "".join(f"<user\n{str(i) * 60}>\n" for i in (1, 2, 3)) + "<assistant\n"
        long = [{"role": "system", "content": "s"}, {"role": "user", "content": "x" * 300}]
        for given in (long, long[1:], [*items[:2], long[1]]):
            alone = await f.post(PATH, {"input": given, "truncation": "auto"})
            assert (alone.status_code, alone.json()["error"]["code"]) == (400, "context_length_exceeded")


def write(*deltas: Delta, reason: Any = "stop") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The response and the events of an answer, one delta per update."""
    writer = ResponseWriter({"id": "resp_1", "output": [], "status": "in_progress"}, lambda update: [])
    events = writer.start()
    for delta in deltas:
        events += writer.update(ChatUpdate(0, [delta], []))
    events += writer.update(ChatUpdate(0, [], [], finish=ChatFinish(reason)))
    return writer.response, events + writer.end(TokenCounts(5, 7, 2))


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    response, events = write(
        Reasoning("th"), Reasoning("ink"), Content("so"), CallStart(0, "c1", "f"), CallArguments(0, '{"a"'), CallArguments(0, ":1}"),
        CallStart(1, "c2", "g"), CallArguments(1, "{}"), reason="tool_calls",
    )  # fmt: skip
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert all(item["status"] == "completed" for item in response["output"])
    reasoning, message, first, second = response["output"]
    assert (reasoning["content"], message["content"][0]["text"]) == ([{"type": "reasoning_text", "text": "think"}], "so")
    assert (first["name"], first["call_id"], first["arguments"], second["arguments"]) == ("f", "c1", '{"a":1}', "{}")
    assert response["status"] == "completed"
    for event in events:
        if "response" not in event:
            EVENT.validate_python(event)
    told: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            told[event["output_index"]] = told.get(event["output_index"], "") + event["delta"]
    assert told == {0: "think", 1: "so", 2: '{"a":1}', 3: "{}"}
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[kinds.index("function_call_arguments.done") - 3 :][:5] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
    ]  # fmt: skip
    assert InputItem.model_validate(first).call_id == "c1"


def test_log_probabilities_of_a_text_come_once_though_it_is_held_back() -> None:
    writer = ResponseWriter({"id": "resp_1", "output": []}, lambda update: [{"token": token} for token in update.token_ids])
    writer.start()
    for token, deltas in enumerate(
        [[], [Reasoning("th")], [], [Content("a")], [], [Content("bc"), CallStart(0, "c1", "f"), CallArguments(0, "{}"), Content("d")], []]
    ):
        writer.update(ChatUpdate(0, deltas, [token]))
    writer.end(TokenCounts(5, 7, 2))
    shown = [part["logprobs"] for item in writer.response["output"] if item["type"] == "message" for part in item["content"]]
    assert shown == [[{"token": 3}, {"token": 4}, {"token": 5}], [{"token": 6}]]


def test_an_answer_without_text_has_an_empty_message() -> None:
    response, events = write()
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    assert events[-1]["response"]["output"] == response["output"]


def test_an_aborted_answer_is_cancelled() -> None:
    response, events = write(Content("a"), reason="abort")
    assert (response["status"], response["output"][0]["status"]) == ("cancelled", "incomplete")
    assert events[-1]["type"] == "response.incomplete"


# ---- refusals


WRONG = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]}, "input"),
    ({"input": "x" * 300}, "input"),
    ({"input": [{"role": "owner", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "item_reference"}]}, "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "background": [False]}, "background"),
    ({"input": "x", "background": 0}, "background"),
    ({"input": "x", "conversation": "conv"}, "conversation"),
    ({"input": "x", "conversation": False}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "max_completion_tokens": 9}, "max_completion_tokens"),
    ({"input": "x", "max_tokens": 9}, "max_tokens"),
    ({"input": "x", "response_format": {"type": "json_object"}}, "response_format"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": 100000}, "max_output_tokens"),
    ({"input": "x", "temperature": 300}, "temperature"),
    ({"input": "x", "tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"input": "x", "metadata": {"a": 1}}, "metadata"),
    ({"input": "x", "truncation": "some"}, "truncation"),
    ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id"),
]
"""Bodies, and the field that each refusal names."""


@in_event_loop
async def test_wrong_requests_are_refused_by_field() -> None:
    async with front() as f:
        for body, param in WRONG:
            answer = await f.post(PATH, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
            assert "messages must" not in answer.text, "that is the name in chat completions"
            assert await f.fine(), body
