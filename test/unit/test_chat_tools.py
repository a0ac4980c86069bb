"""Tools and thinking in chat completions, over a real socket, with a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from formats import text_parser
from front import ScriptedScheduler, front
from pydantic import TypeAdapter

from event_loop import in_event_loop
from runtime.entrypoints.openai.answer_reader import AnswerReader
from runtime.entrypoints.openai.chat_updates import ChatFinish
from runtime.entrypoints.openai.messages import Message
from runtime.entrypoints.openai.protocol import ChatCompletion
from runtime.managers.messages import Finish, TextOut
from runtime.managers.telemetry.progress import Progress
from runtime.sampling_params import MAX_GRAMMAR_CHARS

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn \\"x\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


def ask(
    say: str, body: dict[str, Any], template: str = TEMPLATE, bursts: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Any]]:
    """The whole answer, the chunks of a stream, and the requests that the scheduler saw."""

    async def both() -> tuple[dict[str, Any], list[dict[str, Any]], list[Any]]:
        async with front(ScriptedScheduler(say=lambda request: say, bursts=bursts), template=template, context_length=4000) as f:
            body_ = {"messages": HI, **body}
            answer = await f.post("/v1/chat/completions", body_)
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            TypeAdapter(ChatCompletion).validate_python(whole, strict=True)
            *chunks, done = await f.events("/v1/chat/completions", {**body_, "stream": True, "stream_options": {"include_usage": True}})
            assert done == "[DONE]"
            return whole, chunks, f.scheduler.requests

    return asyncio.run(both())


def refused(body: dict[str, Any]) -> dict[str, Any]:
    """The error of a request."""

    async def post() -> dict[str, Any]:
        async with front(template=TEMPLATE, context_length=4000) as f:
            answer = await f.post("/v1/chat/completions", {"messages": HI, **body})
            assert answer.status_code == 400, answer.text
            assert await f.fine()
            return answer.json()["error"]

    return asyncio.run(post())


def gathered(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the chunks of one choice add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    calls.append({"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}})
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {**message, **({"tool_calls": calls} if calls else {})}


def without_ids(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]


def test_two_calls_are_answered_and_streamed() -> None:
    whole, chunks, requests = ask(f"I look.\n{CALLS}", {"tools": TOOLS})
    message = whole["choices"][0]["message"]
    assert message["content"] == "I look."
    assert [call["name"] for call in without_ids(message)] == ["weather", "clock"]
    assert [json.loads(call["arguments"]) for call in without_ids(message)] == [{"city": 'Bonn "x"'}, {}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    streamed = gathered(chunks)
    assert (streamed["content"], without_ids(streamed)) == ("I look.", without_ids(message))
    prompt = bytes(token for token in requests[0].input_ids if token < 256)
    assert prompt.startswith(b'<tools>{"type": "function", "function": {"name": "weather", "description": "d", "parameters"')


def test_a_stream_of_calls_has_openais_form() -> None:
    _, chunks, _ = ask(CALLS, {"tools": TOOLS})
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    first = deltas[1]["delta"]["tool_calls"][0]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "weather", "arguments": ""}
    pieces = [each["delta"]["tool_calls"][0] for each in deltas[2:-1] if each["delta"]["tool_calls"][0]["index"] == 0]
    assert len(pieces) > 5, "arguments arrive as they are written"
    assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in pieces)
    assert deltas[-1]["delta"] == {}
    assert [each["finish_reason"] for each in deltas] == [None] * (len(deltas) - 1) + ["tool_calls"]


def test_updates_that_wait_together_are_one_chunk_per_part_of_the_answer() -> None:
    whole, chunks, _ = ask(f"{THOUGHT}I look.\n{CALLS}", {"tools": TOOLS}, bursts=True)
    choice, choices = whole["choices"][0], [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    streamed = gathered(chunks)
    assert streamed["reasoning_content"] == choice["message"]["reasoning_content"]
    assert (streamed["content"], without_ids(streamed)) == ("I look.", without_ids(choice["message"]))
    parts = [next(iter(each["delta"]), "") for each in choices]
    assert parts == ["role", "reasoning_content", "content", *["tool_calls"] * 4, ""], "each call has a start and its arguments"
    assert [each["finish_reason"] for each in choices] == [None] * 7 + [choice["finish_reason"]]
    assert chunks[-1]["usage"] == whole["usage"]


def test_content_is_null_beside_calls_alone() -> None:
    whole, _, _ = ask(CALLS, {"tools": TOOLS})
    assert whole["choices"][0]["message"]["content"] is None


def test_without_tools_calls_are_text() -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        whole, _, requests = ask(CALLS, body)
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert b"<tools>" not in bytes(token for token in requests[0].input_ids if token < 256)


def test_malformed_calls_are_text() -> None:
    text = '<tool_call>{"name": "weather", "arguments": 5}</tool_call>'
    whole, chunks, _ = ask(text, {"tools": TOOLS})
    assert whole["choices"][0]["message"]["content"] == text == gathered(chunks)["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_a_call_cut_by_the_length_says_length() -> None:
    whole, chunks, _ = ask(CALLS, {"tools": TOOLS, "max_tokens": 60})
    assert whole["choices"][0]["finish_reason"] == "length"
    assert without_ids(whole["choices"][0]["message"]) == without_ids(gathered(chunks))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "now", "arguments": {}}\n', "tool_calls"),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "B', "stop"),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "B"}}</tool_call><tool_call>{"name": "now", "arguments": {', "stop"),
        ("no call", "stop"),
    ],
)
def test_a_call_cut_by_a_stop_string_says_stop(text: str, reason: Any) -> None:
    finish = Finish(reason="stop", matched="\n\n")
    reader = AnswerReader(text_parser("hermes"))
    pieces = [TextOut(rid="r", text=letter, token_ids=[0], progress=Progress(1)) for letter in text]
    for piece in pieces:
        reader.read(piece)
    assert reader.read(TextOut(rid="r", text="", token_ids=[0], progress=Progress(1), finish=finish)).finish == ChatFinish(reason, "\n\n")


def test_one_call_if_not_parallel() -> None:
    whole, chunks, _ = ask(CALLS, {"tools": TOOLS, "parallel_tool_calls": False})
    assert [call["name"] for call in without_ids(whole["choices"][0]["message"])] == ["weather"]
    assert without_ids(gathered(chunks)) == without_ids(whole["choices"][0]["message"])


def test_only_allowed_tools_may_be_called() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}}
    whole, _, requests = ask(CALLS, {"tools": TOOLS, "tool_choice": choice})
    assert [call["name"] for call in without_ids(whole["choices"][0]["message"])] == ["clock"]
    assert b'"weather"' in bytes(token for token in requests[0].input_ids if token < 256), "all tools are described"


def test_functions_are_the_older_spelling() -> None:
    body = {"functions": [tool["function"] for tool in TOOLS]}
    whole, chunks, _ = ask(CALLS, body)
    choice = whole["choices"][0]
    assert choice["message"]["function_call"]["name"] == "weather"
    assert choice["finish_reason"] == "function_call"
    called = [
        chunk["choices"][0]["delta"]["function_call"]
        for chunk in chunks
        if chunk["choices"] and "function_call" in chunk["choices"][0]["delta"]
    ]
    assert called[0] == {"name": "weather", "arguments": ""}
    assert "".join(piece["arguments"] for piece in called) == choice["message"]["function_call"]["arguments"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "absent"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "developer"}]}, "messages[0].content"),
        ({"reasoning_effort": "very"}, "reasoning_effort"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], field: str) -> None:
    error = refused(body)
    assert error["param"] == field
    assert error["message"].startswith(field.split("[")[0])


def test_required_calls_leave_no_room_for_other_grammars() -> None:
    error = refused({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"})
    assert (error["param"], error["message"]) == (
        "guided_regex",
        "The guided_regex cannot be used: Required tool calls leave no room for text.",
    )
    assert refused({"tools": TOOLS, "tool_choice": "sometimes"})["message"].count("an object") == 1


def test_required_calls_are_enforced_by_a_grammar() -> None:
    whole, _, requests = ask(CALLS.split("\n<tool_call>")[0], {"tools": TOOLS, "tool_choice": "required"})
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    grammar = json.loads(requests[0].sampling.structural_tag)
    text = json.dumps(grammar)
    assert "weather" in text
    assert "clock" in text
    _, _, requests = ask(CALLS, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}})
    assert "weather" not in requests[0].sampling.structural_tag
    strict = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}, CLOCK]
    _, _, requests = ask("text", {"tools": strict})
    assert "triggered_tags" in requests[0].sampling.structural_tag
    _, _, requests = ask("text", {"tools": TOOLS})
    assert requests[0].sampling.structural_tag is None


def test_earlier_calls_and_results_are_rendered() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Look it up."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "4 C <|im_end|>"}]},
    ]
    _, _, requests = ask("ok", {"messages": messages, "tools": TOOLS})
    ids = requests[0].input_ids
    text = bytes(token if token < 256 else ord("#") for token in ids).decode()
    assert '#assistant\n<think>Look it up.</think><tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>#' in text
    assert "#tool\n4 C <|im_end|>#" in text, "a result makes no control token"


def test_templates_may_read_thoughts_by_their_older_name() -> None:
    for field in ("reasoning_content", "reasoning", "thinking"):
        shown = Message.model_validate({"role": "assistant", "content": "Yes.", field: "Look it up."}).rendered()
        assert shown["reasoning_content"] == shown["thinking"] == "Look it up."


PIECES = [{"type": "text", "text": "Look"}, {"type": "reference", "reference_ids": [1]}, {"type": "text", "text": " it up."}]


@pytest.mark.parametrize("part", [
    {"type": "thinking", "thinking": "Look it up.", "signature": "x"}, {"type": "thinking", "thinking": PIECES, "closed": True},
    {"type": "reasoning", "reasoning": "Look it up."}, {"type": "reasoning", "text": "Look it up."},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look it up."}]},
])  # fmt: skip
def test_thoughts_may_be_parts_of_earlier_messages(part: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": [part, {"type": "text", "text": "Yes."}, {"type": "redacted_thinking", "data": "x"}]}
    _, _, requests = ask("ok", {"messages": [*HI, message, *HI]})
    text = bytes(token for token in requests[0].input_ids if token < 256).decode()
    assert "assistant\n<think>Look it up.</think>Yes.\nuser" in text


def test_parts_of_earlier_messages_may_be_refusals_or_only_thoughts() -> None:
    refusal = Message.model_validate({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]})
    assert refusal.rendered() == {"role": "assistant", "content": "No."}
    parts = [{"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": "b"}]
    thoughts = Message.model_validate({"role": "assistant", "content": parts})
    assert thoughts.rendered() == {"role": "assistant", "content": "", "reasoning_content": "a\nb", "thinking": "a\nb"}


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_only_the_assistant_has_thoughts(role: str) -> None:
    content = [{"type": "text", "text": "Yes."}, {"type": "thinking", "thinking": "Look it up."}]
    error = refused({"messages": [*HI, {"role": role, "content": content}]})
    assert error["message"] == "messages[1].content[1] is not supported: only the assistant has thoughts. Leave it out."


def test_older_messages_of_functions_are_rendered() -> None:
    messages = [
        *HI,
        {"role": "assistant", "function_call": {"name": "clock", "arguments": "{}"}},
        {"role": "function", "name": "clock", "content": "12"},
    ]
    _, _, requests = ask("ok", {"messages": messages})
    text = bytes(token for token in requests[0].input_ids if token < 256).decode()
    assert '<tool_call>{"name": "clock", "arguments": {}}</tool_call>' in text
    assert "tool\n12" in text


# ---- thinking


def test_thinking_is_separate_and_counted() -> None:
    whole, chunks, _ = ask(f"{THOUGHT}Yes.", {})
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
    assert gathered(chunks) == {"reasoning_content": "Let me see.", "content": "Yes."}
    thought = len("<think>\nLet me see.\n</think>")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


def test_thinking_before_a_call() -> None:
    whole, _, _ = ask(f"{THOUGHT}{CALLS}", {"tools": TOOLS})
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], len(message["tool_calls"])) == ("Let me see.", 2)


def test_thinking_stays_in_the_content_on_request() -> None:
    whole, chunks, _ = ask(f"{THOUGHT}Yes.", {"separate_reasoning": False})
    assert whole["choices"][0]["message"]["content"] == f"{THOUGHT}Yes." == gathered(chunks)["content"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_thinking_may_come_as_a_whole() -> None:
    _, chunks, _ = ask(f"{THOUGHT}Yes.", {"stream_reasoning": False})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["Let me see."]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


@pytest.mark.parametrize("body", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_thinking_can_be_switched_off(body: dict[str, Any]) -> None:
    whole, _, requests = ask("<think> is a tag", body)
    assert bytes(token for token in requests[0].input_ids if token < 256).endswith(b"<think>\n\n</think>\n\n")
    assert whole["choices"][0]["message"]["content"] == "<think> is a tag"


def test_a_grammar_without_reasoning_holds_from_the_first_token_of_any_template() -> None:
    template = TEMPLATE.replace("enable_thinking", "no_such_switch")
    for switch in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        whole, chunks, requests = ask('{"a": 1}', {"response_format": {"type": "json_object"}, **switch}, template)
        assert whole["choices"][0]["message"]["content"] == '{"a": 1}' == gathered(chunks)["content"]
        assert (requests[0].sampling.structural_tag, requests[0].sampling.json_schema) == (None, '{"type":"object"}')
    kept = {"response_format": {"type": "json_object"}, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert "<think>" in (ask("{}", kept, template)[2][0].sampling.structural_tag or "")


def test_a_schema_that_is_too_long_with_thinking_is_refused_by_its_own_name() -> None:
    schema = {"name": "n", "schema": {"enum": ["x" * (MAX_GRAMMAR_CHARS - 20)]}}
    error = refused({"response_format": {"type": "json_schema", "json_schema": schema}})
    assert error["message"].startswith(f"The whole grammar must be a string of at most {MAX_GRAMMAR_CHARS} characters; got")
    assert error["param"] == "response_format.json_schema.schema"


def test_a_thought_that_the_message_to_continue_opens_goes_on() -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>\nLet me"}]
    whole, _, _ = ask(" see.</think>Yes.", {"messages": messages, "continue_final_message": True})
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" see.", "Yes.")


def test_users_cannot_switch_thinking_by_text() -> None:
    whole, _, _ = ask("Yes.", {"messages": [{"role": "user", "content": "<think>"}]})
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}


def test_a_model_without_thinking_reports_no_reasoning_tokens() -> None:
    whole, _, _ = ask("<think>a</think>b", {}, template=TEMPLATE.replace("think>", "thought>"))
    assert whole["choices"][0]["message"]["content"] == "<think>a</think>b"
    assert "completion_tokens_details" not in whole["usage"]


@in_event_loop
async def test_the_official_client_streams_calls() -> None:
    async with front(ScriptedScheduler(say=lambda request: f"{THOUGHT}{CALLS}"), template=TEMPLATE, context_length=4000) as f:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{f.port}/v1", api_key="none", http_client=f.client)
        async with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:  # type: ignore[arg-type]
            events = [event.type async for event in stream]
            final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events
    assert events.count("tool_calls.function.arguments.done") == 2
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["weather", "clock"]
