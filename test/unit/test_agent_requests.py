"""Requests as agent programs send them, reduced to what matters, over a real socket with a scripted scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from front import ScriptedScheduler, front
from test_chat_tools import TEMPLATE
from test_messages_api import events_of
from test_responses_api import EVENT, prompt_of, stream

from event_loop import in_event_loop
from runtime.entrypoints.openai.messages import LEFT_OUT

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages?beta=true", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"type": "function", "name": "shell", "strict": False, "parameters": PARAMETERS}
CLAUDE_CODE = {
    "model": "tiny", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "high"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.cc4; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Bash", "description": "d", "input_schema": PARAMETERS, "eager_input_streaming": True}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Agents: none."},
    ],
}  # fmt: skip
"""The first request of Claude Code 2.1."""
CODEX = {
    "model": "tiny", "stream": True, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"turn_id": "t"},
    "tools": [
        SHELL,
        {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [{**SHELL, "name": "spawn"}]},
        {"type": "web_search", "external_web_access": True},
    ],
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "Skills: none."}]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Directory: /x"}]},
        {"type": "message", "id": "msg_4", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
    ],
}  # fmt: skip
"""The first request of Codex 0.171."""
FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first') }}{% endif %}"
    "{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calling(name: str) -> ScriptedScheduler:
    """A model that calls one tool."""
    return ScriptedScheduler(say=lambda _: f'Yes.<tool_call>\n{{"name": "{name}", "arguments": {{"command": "ls"}}}}\n</tool_call>')


OPTIONS: dict[str, Any] = {"template": TEMPLATE, "context_length": 4000, "strict_request_fields": True}


@in_event_loop
async def test_claude_code_calls_a_tool_and_sends_its_result() -> None:
    async with front(calling("Bash"), **OPTIONS) as f:
        events = events_of((await f.post(MESSAGES, CLAUDE_CODE)).text)
        assert "<user\nGo.>\n<system\nAgents: none.>\n<assistant\n" in prompt_of(f)
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        use = next(event["content_block"] for event in events if event.get("content_block", {}).get("type") == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use["id"], "is_error": False, "content": [{"type": "text", "text": "a.txt"}]}
        used = {"type": "tool_use", "id": use["id"], "name": use["name"], "input": {"command": "ls"}}
        turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        assert (await f.post(MESSAGES, {**CLAUDE_CODE, "messages": CLAUDE_CODE["messages"] + turns})).status_code == 200
        assert '"command": "ls"' in prompt_of(f)
        assert prompt_of(f).endswith("<tool\na.txt>\n<assistant\n")


@in_event_loop
async def test_conversations_of_claude_code_begin_alike() -> None:
    """A line of its system prompt differs by conversation; with it, the prefix cache would find nothing."""
    async with front(**OPTIONS) as f:
        for version in ("cc4", "e12"):
            first = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{version}; cc_entrypoint=sdk-cli;"}
            await f.post(MESSAGES, {**CLAUDE_CODE, "system": [first, *CLAUDE_CODE["system"][1:]]})
        assert prompt_of(f, 0) == prompt_of(f, 1)
        assert "<system\nYou are an agent.>" in prompt_of(f)


@in_event_loop
async def test_claude_code_finds_a_tool_by_a_search_of_its_own() -> None:
    async with front(**OPTIONS) as f:
        use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
        found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "mcp__x__y"}]}
        turns = [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [found, {"type": "text", "text": "Tool loaded."}]},
        ]
        tools = [*CLAUDE_CODE["tools"], {"name": "mcp__x__y", "input_schema": PARAMETERS, "defer_loading": True}]
        body = {**CLAUDE_CODE, "tools": tools, "messages": CLAUDE_CODE["messages"] + turns}
        assert (await f.post(MESSAGES, body)).status_code == 200
        assert '"name": "mcp__x__y"' in prompt_of(f)
        assert "<tool\nThe tool mcp__x__y can be called now.>\n<user\nTool loaded.>" in prompt_of(f)


@in_event_loop
async def test_the_first_page_answers_head() -> None:
    async with front() as f:
        assert (await f.client.head("/")).status_code == 200


@in_event_loop
async def test_codex_calls_a_function_of_a_namespace_and_sends_its_output() -> None:
    async with front(calling("agents__spawn"), **OPTIONS) as f:
        events = await stream(f, CODEX)
        for event in events:
            EVENT.validate_python(event)
        assert ('"name": "agents__spawn"' in prompt_of(f), "web_search" in prompt_of(f)) == (True, False)
        response = events[-1]["response"]
        assert [tool["type"] for tool in response["tools"]] == ["function", "namespace"]
        call = response["output"][-1]
        assert (call["name"], call["namespace"]) == ("spawn", "agents")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        await stream(f, {**CODEX, "input": [*CODEX["input"], *response["output"], output]})
        called = '<tool_call>{"name": "agents__spawn", "arguments": {"command": "ls"}}</tool_call>'
        assert prompt_of(f).endswith(f"<assistant\nYes.{called}>\n<tool\ndone>\n<assistant\n")


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, CLAUDE_CODE), (RESPONSES, CODEX)], ids=["claude-code", "codex"])
@in_event_loop
async def test_templates_that_take_one_system_message_at_the_start_are_no_obstacle(path: str, body: dict[str, Any]) -> None:
    async with front(template=FIRST_SYSTEM_ONLY, context_length=4000) as f:
        answer = await f.post(path, {name: value for name, value in body.items() if name != "tools"})
        assert answer.status_code == 200, answer.text
        expected = {
            MESSAGES: "<system\nYou are an agent.>\n<user\nGo.\n\nAgents: none.>\n",
            RESPONSES: "<system\nYou are an agent.\n\nSkills: none.>\n<user\nDirectory: /x\n\nGo.>\n",
        }
        assert prompt_of(f) == expected[path] + "<assistant\n"


@in_event_loop
async def test_an_image_in_the_result_of_a_tool_is_told_to_the_model() -> None:
    """Refusing it would end the conversation: the agent sends it again with every later request."""
    async with front(**OPTIONS) as f:
        image = {"type": "image", "source": {"type": "base64", "data": "iVBO", "media_type": "image/png"}}
        use = {"type": "tool_use", "id": "t", "name": "Bash", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "red.png"}, image]}
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        assert (await f.post(MESSAGES, {"max_tokens": 5, "messages": turns})).status_code == 200
        assert f"<tool\nred.png{LEFT_OUT.format('image')}>" in prompt_of(f)
        turns[2] = {"role": "user", "content": [image]}
        assert (await f.post(MESSAGES, {"max_tokens": 5, "messages": turns})).status_code == 400

        output = [{"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "high"}]
        call = {"type": "function_call", "call_id": "t", "name": "view_image", "arguments": "{}"}
        given = [call, {"type": "function_call_output", "call_id": "t", "output": output}]
        assert (await f.post(RESPONSES, {"input": given})).status_code == 200
        assert f"<tool\n{LEFT_OUT.format('image')}>" in prompt_of(f)


@in_event_loop
async def test_the_ai_sdk_refers_to_items_of_stored_responses() -> None:
    async with front(ScriptedScheduler(say=lambda _: "<think>\nhm\n</think>\n\nYes."), reasoning_parser="qwen3", **OPTIONS) as f:
        first = (await f.post(RESPONSES, {"input": "a"})).json()
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        user = {"role": "user", "content": [{"type": "input_text", "text": "b"}]}
        second = (await f.post(RESPONSES, {"input": [user, *references, user]})).json()
        assert prompt_of(f) == "<user\nb>\n<assistant\n<think>hm</think>Yes.>\n<user\nb>\n<assistant\n"
        listed = (await f.client.get(f"{RESPONSES}/{second['id']}/input_items", params={"order": "asc"})).json()["data"]
        assert [item["type"] for item in listed] == ["message", "reasoning", "message", "message"]
        assert (await f.client.delete(f"{RESPONSES}/{first['id']}")).status_code == 200
        unkept = (await f.post(RESPONSES, {"input": "a", "store": False})).json()["output"][0]["id"]
        again = [{"type": "item_reference", "id": second["output"][0]["id"]}] * 2
        for wrong in (references, [{"type": "item_reference", "id": unkept}], again):
            error = (await f.post(RESPONSES, {"input": wrong})).json()["error"]
            assert (error["status"], error["param"], wrong[0]["id"] in error["message"]) == (400, "input", True)


@in_event_loop
async def test_parts_and_calls_may_repeat_other_fields_of_an_answer() -> None:
    """OpenAI's agents SDK for Node puts all fields of the message into its part; Mistral Vibe sends the index of a call."""
    async with front(**OPTIONS) as f:
        calls = [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}]
        part = {"type": "text", "text": "Yes.", "role": "assistant", "refusal": None, "reasoning_content": "hm", "tool_calls": calls}
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [part], "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t", "content": "y"},
        ]
        answer = await f.post(CHAT, {"messages": turns})
        assert answer.status_code == 200, answer.text
        call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        assert prompt_of(f) == f"<user\nx>\n<assistant\n<think>hm</think>Yes.{call}>\n<tool\ny>\n<assistant\n"


CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
ANSWERS = [
    "",
    "Yes.",
    "<think>hm</think>Yes.",
    "<think>hm",
    CALL,
    f"<think>hm</think>I look.\n{CALL}\n{CALL}",
    CALL.replace("{}}", '{"a": "b'),
]


@pytest.mark.parametrize("say", ANSWERS)
@in_event_loop
async def test_every_answer_is_accepted_as_an_earlier_message(say: str) -> None:
    async with front(ScriptedScheduler(say=lambda _: say), reasoning_parser="qwen3", **OPTIONS) as f:
        hi = {"role": "user", "content": "hi"}
        for tools in ({}, {"tools": [{"type": "function", "function": CLOCK}]}, {"functions": [CLOCK]}, {"separate_reasoning": False}):
            answer = (await f.post(CHAT, {"messages": [hi], **tools})).json()["choices"][0]["message"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in answer.get("tool_calls", ())]
            again = await f.post(CHAT, {"messages": [hi, answer, *(results or [hi])], **tools})
            assert again.status_code == 200, again.text
        for tools in ({}, {"tools": [{"type": "function", **CLOCK}]}):
            items = (await f.post(RESPONSES, {"input": [hi], **tools})).json()["output"]
            calls = [item["call_id"] for item in items if item["type"] == "function_call"]
            outputs = [{"type": "function_call_output", "call_id": call, "output": ""} for call in calls]
            again = await f.post(RESPONSES, {"input": [hi, *items, *(outputs or [hi])], **tools})
            assert again.status_code == 200, again.text
