"""Converts a request to /v1/responses into a chat body: items become messages, and tool definitions are nested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from runtime.entrypoints.http.body import SamplingFields
from runtime.entrypoints.openai.response_protocol import ChosenTool, InputItem, ResponseBody, ResponseTool, TextFormat, text_of
from runtime.errors import RequestError

Json = dict[str, Any]

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat body under their names in /v1/responses."""

SAME = ("cache_salt", "chat_template_kwargs", "model", "parallel_tool_calls", "priority", "stream", "top_logprobs")
"""Fields with the same name and meaning in a chat body, besides those of sampling."""
SYSTEM_ROLES = ("system", "developer")
"""Messages of these roles are never dropped."""


def chat_fields(body: ResponseBody, conversation: Sequence[InputItem]) -> Json:
    """The fields of the chat body that answers `body`, whose conversation so far is `conversation`."""
    return {
        **body.model_dump(include={*SamplingFields.model_fields, *SAME}, exclude_unset=True),
        "messages": messages(conversation, body.instructions),
        "logprobs": body.logprobs or None,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort,
        "response_format": _response_format(body.text.format),
        "tool_choice": _choice(body),
        "tools": [tool for given in body.tools for tool in _tools(given)] or None,
    }


# ---- items


def messages(conversation: Iterable[InputItem], instructions: str | None) -> list[Json]:
    """The messages of a conversation. Reasoning and calls are merged into the assistant message that they belong to.

    Raises:
        RequestError: there are none, because all items are reasoning.
    """
    done: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in conversation:
        if item.type == "function_call_output":
            done.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output or "")})
        elif item.type == "message" and item.role != "assistant":
            done.append({"role": item.role, "content": text_of(item.content)})
        else:
            _add_to_assistant(done, item)
    kept = [message for message in done if message["role"] != "assistant" or "content" in message or "tool_calls" in message]
    if not kept:
        raise RequestError("input must contain a message, a function call or its output.", "input")
    return kept


def _add_to_assistant(done: list[Json], item: InputItem) -> None:
    """Add reasoning, text or a call to the last assistant message, or to a new one if the order would change otherwise."""
    last = done[-1] if done and done[-1]["role"] == "assistant" else {}
    taken = {"reasoning": last.keys() - {"role"}, "message": {"content", "tool_calls"} & last.keys()}
    if not last or taken.get(item.type):
        done.append(last := {"role": "assistant"})
    if item.type == "reasoning":
        last["reasoning_content"] = text_of(item.content) or text_of(item.summary)
    elif item.type == "message":
        last["content"] = text_of(item.content)
    else:
        function = {"name": chat_name(item.namespace, item.name or ""), "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def without_oldest(conversation: Sequence[InputItem], count: int) -> list[InputItem]:
    """The conversation without its `count` oldest items. System messages stay; outputs of dropped calls are dropped too."""
    kept: list[InputItem] = []
    for item in conversation:
        if count and item.role not in SYSTEM_ROLES:
            count -= 1
        else:
            kept.append(item)
    calls = {item.call_id for item in kept if item.type == "function_call"}
    return [item for item in kept if item.type != "function_call_output" or item.call_id in calls]


# ---- tools and formats


def _choice(body: ResponseBody) -> str | Json | None:
    """The `tool_choice` of the chat body."""
    choice = body.tool_choice
    if not isinstance(choice, ChosenTool):
        return choice
    if choice.type == "function":
        return _reference(choice.name)
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": [_reference(tool.name) for tool in choice.tools]}}


def _reference(name: str | None) -> Json:
    return {"type": "function", "function": {"name": name}}


def chat_name(namespace: str | None, name: str) -> str:
    """The name of a function in the prompt."""
    return f"{namespace}__{name}" if namespace else name


def call_names(tools: Iterable[ResponseTool]) -> dict[str, Json]:
    """Name and namespace of each function in a namespace, by its name in the prompt."""
    return {
        chat_name(tool.name, function.name): {"name": function.name, "namespace": tool.name} for tool in tools for function in tool.tools
    }


def _tools(tool: ResponseTool) -> list[Json]:
    """The functions of a tool."""
    namespace = tool.name if tool.type == "namespace" else None
    given = {"function": [tool], "namespace": tool.tools}.get(tool.type, [])
    return [
        {
            "type": "function",
            "function": {**each.model_dump(include={"description", "parameters", "strict"}), "name": chat_name(namespace, each.name)},
        }
        for each in given
    ]


def _response_format(wanted: TextFormat) -> Json | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema_ is None:
        raise RequestError("text.format.schema is required for type json_schema.", "text.format.schema")
    schema = {"name": wanted.name or "answer", "description": wanted.description, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
