"""Requests as agent programs send them, reduced to what matters, over a real socket with a scripted scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from front import ScriptedScheduler, front
from test_chat_tools import TEMPLATE
from test_messages_api import events_of
from test_responses_api import prompt_of

from runtime.entrypoints.openai.messages import LEFT_OUT

MESSAGES = "/v1/messages?beta=true"
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
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


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def calling(name: str) -> ScriptedScheduler:
    """A model that calls one tool."""
    return ScriptedScheduler(say=lambda _: f'Yes.<tool_call>\n{{"name": "{name}", "arguments": {{"command": "ls"}}}}\n</tool_call>')


OPTIONS: dict[str, Any] = {"template": TEMPLATE, "context_length": 4000, "strict_request_fields": True}


def test_claude_code_calls_a_tool_and_sends_its_result() -> None:
    async def check() -> None:
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

    run(check())


def test_conversations_of_claude_code_begin_alike() -> None:
    """A line of its system prompt differs by conversation; with it, the prefix cache would find nothing."""

    async def check() -> None:
        async with front(**OPTIONS) as f:
            for version in ("cc4", "e12"):
                first = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{version}; cc_entrypoint=sdk-cli;"}
                await f.post(MESSAGES, {**CLAUDE_CODE, "system": [first, *CLAUDE_CODE["system"][1:]]})
            assert prompt_of(f, 0) == prompt_of(f, 1)
            assert "<system\nYou are an agent.>" in prompt_of(f)

    run(check())


def test_the_first_page_answers_head() -> None:
    async def check() -> None:
        async with front() as f:
            assert (await f.client.head("/")).status_code == 200

    run(check())


def test_an_image_in_the_result_of_a_tool_is_told_to_the_model() -> None:
    """Refusing it would end the conversation: the agent sends it again with every later request."""

    async def check() -> None:
        async with front(**OPTIONS) as f:
            image = {"type": "image", "source": {"type": "base64", "data": "iVBO", "media_type": "image/png"}}
            use = {"type": "tool_use", "id": "t", "name": "Bash", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "red.png"}, image]}
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
            assert (await f.post(MESSAGES, {"max_tokens": 5, "messages": turns})).status_code == 200
            assert f"<tool\nred.png{LEFT_OUT.format('image')}>" in prompt_of(f)
            turns[2] = {"role": "user", "content": [image]}
            assert (await f.post(MESSAGES, {"max_tokens": 5, "messages": turns})).status_code == 400

    run(check())
