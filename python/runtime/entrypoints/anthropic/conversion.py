"""Converts a request to /v1/messages into a chat body: blocks become messages, calls and their results."""

from __future__ import annotations

import json
from typing import Any

from runtime.entrypoints.anthropic.protocol import Block, CountBody, MessagesBody, TextBlock, Tool, ToolChoice, Turn, text_of

Json = dict[str, Any]

CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
}
"""Fields of a chat body under their names in /v1/messages."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
CLIENT_LINE = "x-anthropic-billing-header:"
EFFORTS = {"xhigh": "high", "max": "high"}
"""Effort levels that chat templates do not know, and the level that replaces them."""


def prompt_fields(body: CountBody) -> Json:
    """The chat body fields that determine the prompt. If the last message is the assistant's, the answer continues it."""
    last = body.messages[-1]
    effort, form = body.output_config.effort, body.output_config.format
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    schema = {"name": "answer", "schema": form.schema_, "strict": True} if form is not None else None
    return {
        "messages": messages(body),
        "model": body.model,
        "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
        "continue_final_message": (last.role == "assistant" and not _calls(last)) or None,
        "reasoning_effort": effort and EFFORTS.get(effort, effort),
        "response_format": schema and {"type": "json_schema", "json_schema": schema},
        **_tools(body.tools, body.tool_choice),
    }


def chat_fields(body: MessagesBody, max_tokens: int) -> Json:
    """The fields of the chat body that answers `body` in at most `max_tokens` tokens."""
    return {
        **prompt_fields(body),
        **body.model_dump(include={"priority", "stream", "temperature", "top_k", "top_p"}),
        "max_completion_tokens": min(body.max_tokens, max_tokens),
        "stop": body.stop_sequences or None,
    }


def messages(body: CountBody) -> list[Json]:
    """The conversation as chat messages."""
    done: list[Json] = [] if body.system is None else [{"role": "system", "content": _system(body.system)}]
    for turn in body.messages:
        done.extend(_turn(turn))
    return done


def _system(system: str | list[TextBlock]) -> str:
    """The system prompt without Claude Code's usage line, which differs by conversation and would prevent prefix cache hits."""
    return text_of(system if isinstance(system, str) else [block for block in system if not block.text.startswith(CLIENT_LINE)])


def _turn(turn: Turn) -> list[Json]:
    if turn.role == "system":
        return [{"role": "system", "content": text_of(turn.content)}]
    return [_assistant(turn)] if turn.role == "assistant" else _user(turn)


def _user(turn: Turn) -> list[Json]:
    """Each tool result becomes its own message; the text becomes a user message after them."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    results = [_result(block) for block in turn.content if block.type == "tool_result"]
    text = text_of(turn.content)
    return [*results, {"role": "user", "content": text}] if text or not results else results


def _result(block: Block) -> Json:
    text = block.content if isinstance(block.content, str) else "".join(part.shown for part in block.content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


def _assistant(turn: Turn) -> Json:
    message: Json = {"role": "assistant"}
    calls, text = _calls(turn), text_of(turn.content)
    if text or not calls:
        message["content"] = text
    if calls:
        message["tool_calls"] = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
            for block in calls
        ]
    thinking = "" if isinstance(turn.content, str) else "".join(block.thinking for block in turn.content)
    return {**message, "reasoning_content": thinking} if thinking else message


def _calls(turn: Turn) -> list[Block]:
    return [] if isinstance(turn.content, str) else [block for block in turn.content if block.type == "tool_use"]


def _tools(tools: list[Tool], choice: ToolChoice | None) -> Json:
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict} for tool in tools
    ]
    given = [{name: value for name, value in function.items() if value is not None} for function in functions]
    fields: Json = {"tools": [{"type": "function", "function": function} for function in given] or None}
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return fields
