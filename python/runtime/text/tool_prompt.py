"""Adapts tools in conversations to what a chat template supports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import RequestError
from runtime.text.characters import whole_characters

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str]
"""Renders messages and tools with a template."""

INSTRUCTIONS = """You may call functions to help with the user's request. These are their signatures, one JSON object per line:
<tools>
{tools}
</tools>

To call a function, answer with its name and its arguments in this form, once for each call:
{form}"""
"""The instructions to the model if its chat template does not describe tools."""
WITH_TOOLS = "You are a helpful assistant with some tools."
"""The system message of Phi-4-mini's documentation, for chats without one."""
FUNCTION, ARGUMENTS = "<function-name>", "<arguments-as-json-object>"
HERMES_FORM = f'<tool_call>\n{{"name": "{FUNCTION}", "arguments": {ARGUMENTS}}}\n</tool_call>'
"""The default form of calls; many models are trained with it."""

_NAME, _KEY, _VALUE, _TEXT = "probe_function", "probe_key", "probe_value", "probe_text"
_SHORT_ID, _LONG_ID = "probe0000", "call_0123456789abcdef01234567"
_SECOND_ID, _SECOND_VALUE = "probe0001", "probe_second"
USER = {"role": "user", "content": "x"}
PLAIN_TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {}}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME, "description": "x", "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "x"}}},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How a chat template handles tools.

    Attributes:
        describes_tools: whether it renders descriptions of tools.
        renders_calls: whether it renders calls and their results.
        argument_objects: whether it expects the arguments of calls as objects; otherwise as JSON text.
        tools_in_system: whether it renders the field `tools` of a system message, as that of Phi-4-mini does.
        takes_system: whether it accepts a system message.
        short_ids: whether it accepts only call ids of nine letters and digits, as Mistral's templates do.
        one_call: whether a message may have only one call, as with the templates of Llama 3 and gpt-oss.
        thought_or_text: whether it rejects a call with both a thought and a text, as gpt-oss's template does.
    """

    describes_tools: bool
    renders_calls: bool
    argument_objects: bool
    tools_in_system: bool
    takes_system: bool
    short_ids: bool
    one_call: bool
    thought_or_text: bool

    @classmethod
    def probe(cls, render: Render) -> TemplateTraits:
        """Determine the traits by rendering short conversations."""
        arguments: object = {_KEY: _VALUE}
        given = rendered(render, called(arguments))
        objects = _VALUE in given and f"'{_KEY}'" not in given
        arguments = arguments if objects else json.dumps(arguments)
        text = given if objects else rendered(render, called(arguments))
        _, call, result = called(arguments)
        spoken = {**call, "content": _TEXT}
        second = json.loads(json.dumps(call["tool_calls"]).replace(_SHORT_ID, _SECOND_ID).replace(_VALUE, _SECOND_VALUE))
        twice = [USER, {**call, "tool_calls": [*call["tool_calls"], *second]}, result, {**result, "tool_call_id": _SECOND_ID}]
        return cls(
            describes_tools=_NAME in rendered(render, [USER], [_TOOL]),
            renders_calls=_VALUE in text and _TEXT in text,
            argument_objects=objects,
            tools_in_system=_NAME in rendered(render, [{"role": "system", "content": "", "tools": _NAME}, USER]),
            takes_system=_TEXT in rendered(render, [{"role": "system", "content": _TEXT}, USER]),
            short_ids=_TEXT in text and _TEXT not in rendered(render, called(arguments, name=_LONG_ID)),
            one_call=_VALUE in text and _SECOND_VALUE not in rendered(render, twice),
            thought_or_text=bool(rendered(render, [USER, spoken, result]))
            and not rendered(render, [USER, {**spoken, "thinking": _TEXT}, result]),
        )


def called(arguments: object, text: str = _TEXT, name: str = _SHORT_ID) -> list[Message]:
    """A conversation with a call that has these arguments and the id `name`, and `text` as its result."""
    call = {"id": name, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": name, "name": _NAME, "content": text}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def rendered(render: Render, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
    """The text of a conversation; empty if the template rejects it."""
    try:
        return render(messages, tools)
    except RequestError:
        return ""


def uses_tools(messages: Sequence[Message], tools: Sequence[Message]) -> bool:
    """Whether there are tools, calls or results."""
    return bool(tools) or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def fit_tools(messages: Sequence[Message], tools: Sequence[Message], traits: TemplateTraits, form: str) -> list[Message]:
    """Adapt messages to a template with these traits.

    Args:
        messages: calls have JSON text as `arguments`; contents are texts.
        tools: descriptions in OpenAI's form.
        form: the form of a call, with `FUNCTION` and `ARGUMENTS` as placeholders.
    """
    if not traits.renders_calls:
        fitted = _as_text(messages, form)
    else:
        fitted = [_with_objects(message) for message in messages] if traits.argument_objects else list(messages)
    if traits.short_ids:
        fitted = [_with_short_ids(message) for message in fitted]
    if traits.one_call:
        fitted = _with_single_calls(fitted)
    if traits.thought_or_text:
        fitted = [_with_text_in_thought(message) for message in fitted]
    if traits.describes_tools or not tools:
        return fitted
    return _with_tools_in_system(fitted, tools) if traits.tools_in_system else _instructed(fitted, tools, form, traits.takes_system)


def _with_objects(message: Message) -> Message:
    """A message whose calls have objects as arguments; text that is not a JSON object stays."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _with_short_ids(message: Message) -> Message:
    """A message whose call ids are nine letters and digits. A conversation that began with another model may have other ids."""
    calls = [{**call, "id": _short_id(call["id"])} for call in message.get("tool_calls") or ()]
    named = {"tool_call_id": _short_id(message["tool_call_id"])} if message.get("tool_call_id") else {}
    return {**message, **named, "tool_calls": calls} if calls else {**message, **named}


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Messages with one call each; every call is followed by its results. The first keeps the text and the thought."""
    single: list[Message] = []
    groups: dict[str, list[Message]] = {}  # each call of the last message with several, and its results, by id
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool" and (group := groups.get(message.get("tool_call_id", ""))):
            place = next(i for i in reversed(range(len(single))) if single[i] is group[-1])
            single.insert(place + 1, message)
            group.append(message)
        elif len(calls) > 1:
            split = [{**message, "tool_calls": calls[:1]}]
            split += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
            groups = {call["id"]: [each] for call, each in zip(calls, split, strict=True)}
            single += split
        else:
            single.append(message)
    return single


def _with_text_in_thought(message: Message) -> Message:
    """A message whose text is part of its thought, if it has a thought and calls."""
    text, thought = message.get("content"), message.get("thinking")
    if not (text and thought and message.get("tool_calls")):
        return message
    return {**message, "content": "", "thinking": f"{thought}\n\n{text}"}


def _short_id(name: str) -> str:
    return name if len(name) == len(_SHORT_ID) and name.isalnum() else hashlib.sha256(name.encode()).hexdigest()[: len(_SHORT_ID)]


def _object(text: str) -> object:
    try:
        value = json.loads(text or "{}")
        value = json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _as_text(messages: Sequence[Message], form: str) -> list[Message]:
    """Messages with calls and results written as text."""
    plain: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            last = plain[-1] if plain and plain[-1].get("of_tools") else None
            text = f"{last['content']}\n{response}" if last is not None else response
            plain[len(plain) - (last is not None) :] = [{"role": "user", "content": text, "of_tools": True}]
        else:
            texts = [message["content"], *(_call_text(call["function"], form) for call in calls)]
            content = "\n".join(text for text in texts if text) if calls else message["content"]
            plain.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content})
    return [{key: value for key, value in message.items() if key != "of_tools"} for message in plain]


def _call_text(function: Mapping[str, Any], form: str) -> str:
    form = form if ARGUMENTS in form else HERMES_FORM
    return form.replace(FUNCTION, function["name"]).replace(ARGUMENTS, function["arguments"] or "{}")


def _with_tools_in_system(messages: list[Message], tools: Sequence[Message]) -> list[Message]:
    """Add the functions to the first system message, as the JSON text of a list."""
    described = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else ({"role": "system", "content": WITH_TOOLS}, messages)
    return [{**first, "tools": described}, *rest]


def _instructed(messages: list[Message], tools: Sequence[Message], form: str, takes_system: bool) -> list[Message]:
    """Add the instructions after the system message, or before the first message if the template accepts no system message."""
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), form=form)
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
