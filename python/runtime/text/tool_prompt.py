"""Tools in conversations: fitted to what a chat template understands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import RequestError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str]
"""Renders messages and tools with a template."""

INSTRUCTIONS = """You may call functions to help with the user's request. These are their signatures, one JSON object per line:
<tools>
{tools}
</tools>

To call a function, answer with its name and its arguments as a JSON object within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-as-json-object>}}
</tool_call>
The results come back within <tool_response></tool_response> tags."""
"""What the model is told about tools if its chat template knows none; Hermes models are trained with this form."""

_NAME, _KEY, _VALUE, _TEXT = "probe_function", "probe_key", "probe_value", "probe_text"
_USER = {"role": "user", "content": "x"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME, "description": "x", "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "x"}}},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template does with tools.

    Attributes:
        knows_tools: whether it renders tools, calls and their results.
        argument_objects: whether it takes the arguments of calls as objects; otherwise as JSON text.
        takes_system: whether it takes a system message.
    """

    knows_tools: bool
    argument_objects: bool
    takes_system: bool

    @classmethod
    def probe(cls, render: Render) -> TemplateTraits:
        """Find out by rendering short conversations."""
        given = _rendered(render, _called({_KEY: _VALUE}))
        return cls(
            knows_tools=_NAME in _rendered(render, [_USER], [_TOOL]),
            argument_objects=_VALUE in given and f"'{_KEY}'" not in given,
            takes_system=_TEXT in _rendered(render, [{"role": "system", "content": _TEXT}, _USER]),
        )


def _called(arguments: object) -> list[Message]:
    call = {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "probe0000", "name": _NAME, "content": "x"}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def _rendered(render: Render, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
    try:
        return render(messages, tools)
    except RequestError:
        return ""


def uses_tools(messages: Sequence[Message], tools: Sequence[Message]) -> bool:
    """Whether there are tools, calls or results."""
    return bool(tools) or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def fit_tools(messages: Sequence[Message], tools: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """The messages as a template with these traits understands them.

    Args:
        messages: calls have JSON text as `arguments`; contents are texts.
        tools: descriptions in OpenAI's form.
    """
    if not traits.knows_tools:
        return _as_text(messages, tools, traits.takes_system)
    return [_with_objects(message) for message in messages] if traits.argument_objects else list(messages)


def _with_objects(message: Message) -> Message:
    """A message whose calls have objects as arguments; text that is no object stays."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _object(text: str) -> object:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _as_text(messages: Sequence[Message], tools: Sequence[Message], takes_system: bool) -> list[Message]:
    """Tools, calls and results as text in the form of Hermes."""
    plain: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            last = plain[-1] if plain and plain[-1].get("of_tools") else None
            text = f"{last['content']}\n{response}" if last is not None else response
            plain[len(plain) - (last is not None) :] = [{"role": "user", "content": text, "of_tools": True}]
        else:
            texts = [message["content"], *(_call_text(call["function"]) for call in calls)]
            content = "\n".join(text for text in texts if text) if calls else message["content"]
            plain.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content})
    plain = [{key: value for key, value in message.items() if key != "of_tools"} for message in plain]
    return _instructed(plain, tools, takes_system) if tools else plain


def _call_text(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"] or "{}"}}}\n</tool_call>'


def _instructed(messages: list[Message], tools: Sequence[Message], takes_system: bool) -> list[Message]:
    """Put the instructions behind the system message, or in front of the first message of a template without one."""
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
