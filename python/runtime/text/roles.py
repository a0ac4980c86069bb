"""Roles of messages: fitted to what a chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from runtime.text.tool_prompt import Message, Render, rendered

_TEXT = "probe_text"
_USER, _ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}


@dataclass(frozen=True, slots=True)
class RoleTraits:
    """Which messages a chat template takes, in which order.

    Attributes:
        later_system: whether it renders a system message that is not the first message.
        successive_users: whether it renders two messages of the user one after the other.
    """

    later_system: bool
    successive_users: bool

    @classmethod
    def probe(cls, render: Render) -> RoleTraits:
        """Find out by rendering short conversations."""
        later = [_USER, _ASSISTANT, {"role": "system", "content": _TEXT}, _USER]
        return cls(
            later_system=_TEXT in rendered(render, later),
            successive_users=_TEXT in rendered(render, [_USER, {"role": "user", "content": _TEXT}]),
        )


def has_unusual_order(messages: Sequence[Message]) -> bool:
    """Whether some template may reject or drop messages: a system message is not the first, or two of the user follow each other."""
    return any(after["role"] == "system" or before["role"] == after["role"] == "user" for before, after in pairwise(messages))


def fit_roles(messages: Sequence[Message], traits: RoleTraits) -> list[Message]:
    """The messages as a template with these traits takes them.

    Where it takes a system message only as the first, those at the start become one, and later ones become messages of the user.
    Where it takes no two messages of the user in a row, they become one.
    """
    joined = {role for role, taken in (("system", traits.later_system), ("user", traits.successive_users)) if not taken}
    fitted: list[Message] = []
    for message in messages:
        last = fitted[-1] if fitted else None
        if message["role"] == "system" and "system" in joined and last is not None and last["role"] != "system":
            message = {**message, "role": "user"}
        if last is not None and last["role"] == message["role"] and message["role"] in joined and _are_texts(last, message):
            fitted[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            fitted.append(message)
    return fitted


def _are_texts(*messages: Message) -> bool:
    return all(isinstance(message.get("content"), str) for message in messages)
