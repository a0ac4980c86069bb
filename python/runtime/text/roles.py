"""Adapts the roles of messages to what a chat template accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from runtime.text.tool_prompt import USER, Message, Render, TemplateTraits, called, rendered

_FIRST, _TEXT = "probe_first", "probe_text"
_ASSISTANT = {"role": "assistant", "content": "x"}
_BLANK_ASSISTANT, _BLANK_USER = {"role": "assistant", "content": " "}, {"role": "user", "content": " "}
"""Blank messages; some templates reject empty ones."""


@dataclass(frozen=True, slots=True)
class RoleTraits:
    """Which orders of messages a chat template renders.

    Attributes:
        system: a system message at the start.
        later_system: system messages at other positions too.
        assistant_first: a conversation that begins with an assistant message.
        successive: the roles, of user and assistant, that may have two messages in a row.
        blank_after_tool: whether a user message after a tool result is rendered only with an assistant message between them.
    """

    system: bool
    later_system: bool
    assistant_first: bool
    successive: frozenset[str]
    blank_after_tool: bool

    @classmethod
    def probe(cls, render: Render, traits: TemplateTraits) -> RoleTraits:
        """Determine the traits by rendering short conversations. `traits` says how the template handles tools."""

        def shows(text: str, *messages: Message) -> bool:
            return text in rendered(render, messages)

        first, last = {"role": "system", "content": _FIRST}, {"role": "system", "content": _TEXT}
        user, assistant = {**USER, "content": _TEXT}, {**_ASSISTANT, "content": _TEXT}
        both = (first, USER, _ASSISTANT, last, USER)
        pairs = {"user": (USER, user), "assistant": (USER, _ASSISTANT, assistant, USER)}
        call = called({} if traits.argument_objects else "{}", "x")
        return cls(
            system=traits.takes_system,
            later_system=shows(_FIRST, *both) and shows(_TEXT, *both),
            assistant_first=shows(_TEXT, assistant, USER),
            successive=frozenset(role for role, pair in pairs.items() if shows(_TEXT, *pair)),
            blank_after_tool=not shows(_TEXT, *call, user) and shows(_TEXT, *call, _BLANK_ASSISTANT, user),
        )

    @property
    def joined(self) -> frozenset[str]:
        """Roles whose consecutive messages are merged."""
        return (frozenset(("user", "assistant")) - self.successive) | (frozenset() if self.later_system else {"system"})


def has_unusual_order(messages: Sequence[Message]) -> bool:
    """Whether some template may reject or drop messages: there is a system message, two messages of one role in a row, an assistant
    message at the start, or a user message after a tool result.
    """
    roles = [message["role"] for message in messages]
    neighbours = any(before == after != "tool" or (before, after) == ("tool", "user") for before, after in pairwise(roles))
    return neighbours or "system" in roles or roles[:1] == ["assistant"]


def fit_roles(messages: Sequence[Message], traits: RoleTraits) -> list[Message]:
    """Adapt messages to a template with these traits.

    If it accepts system messages only at the start, those at the start are merged, and later ones become user messages. If it accepts
    none, all become user messages. If it rejects two user or assistant messages in a row, they are merged. If it requires a message
    before an assistant message or after a tool result, a blank one is inserted.
    """
    fitted: list[Message] = []
    for message in messages:
        last = fitted[-1] if fitted else None
        leading = last is None or last["role"] == "system"
        if message["role"] == "system" and not (traits.system and (leading or traits.later_system)):
            message = {**message, "role": "user"}
        if last is not None and last["role"] == message["role"] in traits.joined and _are_texts(last, message):
            fitted[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
            continue
        if leading and message["role"] == "assistant" and not traits.assistant_first:
            fitted.append(_BLANK_USER)
        if last is not None and last["role"] == "tool" and message["role"] == "user" and traits.blank_after_tool:
            fitted.append(_BLANK_ASSISTANT)
        fitted.append(message)
    return fitted


def _are_texts(*messages: Message) -> bool:
    return all(isinstance(message.get("content"), str) and not message.get("tool_calls") for message in messages)
