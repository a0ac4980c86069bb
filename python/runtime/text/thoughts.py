"""Gives the thoughts of earlier messages to chat templates that read them as parts of the content."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.text.tool_prompt import USER, Message, Render, rendered

_TEXT, _THOUGHT = "probe_text", "probe_thought"
_MESSAGE = {"role": "assistant", "content": _TEXT, "thinking": _THOUGHT, "reasoning_content": _THOUGHT}


def takes_thoughts_as_parts(render: Render) -> bool:
    """Whether a template renders a thought only as a part of the content, as some of Mistral's do."""
    text = rendered(render, [USER, *with_thought_parts([_MESSAGE])])
    written = f"'{_THOUGHT}'" in text or f'"{_THOUGHT}"' in text  # a template that writes any content as it is
    return _THOUGHT in text and _TEXT in text and not written and _THOUGHT not in rendered(render, [USER, _MESSAGE])


def with_thought_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages whose thoughts are parts of their contents."""
    return [
        {**message, "content": [{"type": "thinking", "thinking": message["thinking"]}, {"type": "text", "text": message["content"]}]}
        if message.get("thinking") and isinstance(message["content"], str)
        else message
        for message in messages
    ]
