"""Roles of messages: fitted to what a chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from runtime.text.tool_prompt import Message, Render, TemplateTraits, called, rendered

_FIRST, _TEXT = "probe_first", "probe_text"
_USER, _ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
_SILENT, _SILENT_USER = {"role": "assistant", "content": " "}, {"role": "user", "content": " "}
"""Messages that say nothing; some templates reject empty ones."""


@dataclass(frozen=True, slots=True)
class RoleTraits:
    """Which messages a chat template takes, in which order.

    Attributes:
        system: whether it renders a system message that is the first message.
        later_system: whether it renders one that is not the first too.
        assistant_first: whether it renders a conversation that begins with a message of the assistant.
        successive: those of user and assistant of which it renders two messages one after the other.
        pause_after_tool: whether it renders a message of the user after the result of a tool only if one of the assistant is between
            them.
    """

    system: bool
    later_system: bool
    assistant_first: bool
    successive: frozenset[str]
    pause_after_tool: bool

    @classmethod
    def probe(cls, render: Render, traits: TemplateTraits) -> RoleTraits:
        """Find out by rendering short conversations. `traits`: what the template does with tools."""

        def shows(text: str, *messages: Message) -> bool:
            return text in rendered(render, messages)

        first, last = {"role": "system", "content": _FIRST}, {"role": "system", "content": _TEXT}
        user, assistant = {**_USER, "content": _TEXT}, {**_ASSISTANT, "content": _TEXT}
        both = (first, _USER, _ASSISTANT, last, _USER)
        pairs = {"user": (_USER, user), "assistant": (_USER, _ASSISTANT, assistant, _USER)}
        call = called({} if traits.argument_objects else "{}", "x")
        return cls(
            system=traits.takes_system,
            later_system=shows(_FIRST, *both) and shows(_TEXT, *both),
            assistant_first=shows(_TEXT, assistant, _USER),
            successive=frozenset(role for role, pair in pairs.items() if shows(_TEXT, *pair)),
            pause_after_tool=not shows(_TEXT, *call, user) and shows(_TEXT, *call, _SILENT, user),
        )

    @property
    def joined(self) -> frozenset[str]:
        """Roles of which messages that follow each other become one."""
        return (frozenset(("user", "assistant")) - self.successive) | (frozenset() if self.later_system else {"system"})


def has_unusual_order(messages: Sequence[Message]) -> bool:
    """Whether some template may reject or drop messages: of the system, two of one role, a first one of the assistant, or one of the user
    after the result of a tool.
    """
    roles = [message["role"] for message in messages]
    neighbours = any(before == after != "tool" or (before, after) == ("tool", "user") for before, after in pairwise(roles))
    return neighbours or "system" in roles or roles[:1] == ["assistant"]


def fit_roles(messages: Sequence[Message], traits: RoleTraits) -> list[Message]:
    """The messages as a template with these traits takes them.

    Where it takes a system message only as the first, those at the start become one, and later ones become messages of the user; where
    it takes none, all do. Where it takes no two messages of the user or the assistant in a row, they become one. Where it lacks a message
    before one of the assistant, or after the result of a tool, a blank one is put there.
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
            fitted.append(_SILENT_USER)
        if last is not None and last["role"] == "tool" and message["role"] == "user" and traits.pause_after_tool:
            fitted.append(_SILENT)
        fitted.append(message)
    return fitted


def _are_texts(*messages: Message) -> bool:
    return all(isinstance(message.get("content"), str) and not message.get("tool_calls") for message in messages)
