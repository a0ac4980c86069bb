"""The messages of a conversation in request bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from runtime.entrypoints.http.body import Body, Name, Unused, items, unsupported
from runtime.entrypoints.http.field_rules import any_of, has, lacks, type_needs
from runtime.entrypoints.openai.tools import CalledFunction, CalledTool, CalledTools

MAX_MESSAGES = 4096
TEXT_PARTS_ONLY = "this server reads text parts only and opens no URL"
LEFT_OUT = "[The {} was left out: this model reads text only.]"
"""The text that the model reads instead of an unsupported part of a tool result."""

MAY_BE_EMPTY = ("assistant", "tool", "function")
"""The roles whose messages need no content: clients repeat empty answers, and results of tools that return nothing."""
SHOWN_PARTS = ("text", "refusal")
"""The types of parts that are text of the message; the others are thoughts of the assistant."""


class ThoughtPiece(Body):
    """A piece of a thought. Pieces that are not text, such as references, have no effect."""

    type: str
    text: str = ""


Thought = str | Annotated[list[ThoughtPiece], items(0, MAX_MESSAGES)]


class MessagePart(Body):
    """A part of a message: text, a refusal, or a thought of the assistant.

    Clients send a thought as they got it: as `thinking` (Anthropic, Mistral), as `reasoning`, `text` or `summary`, or encrypted, without
    effect. OpenAI's agents SDK for Node repeats the other fields of an assistant message in its parts.
    """

    OTHER_TYPES = TEXT_PARTS_ONLY
    RULES = (type_needs("text", "text"), type_needs("refusal", "refusal"))

    type: Literal["text", "refusal", "thinking", "reasoning", "redacted_thinking"]
    text: str | None = None
    refusal: str | None = None
    reasoning: Thought = ""
    reasoning_content: str | None = None
    summary: Thought = ""
    thinking: Thought = ""
    cache_control: Unused = None
    closed: Unused = None
    data: Unused = None
    role: Unused = None
    signature: Unused = None
    tool_calls: Unused = None

    @model_validator(mode="after")
    def _check_fields(self) -> MessagePart:
        if self.type in SHOWN_PARTS and getattr(self, self.type) is None:
            raise PydanticCustomError("required", "required", {"field": self.type})
        return self

    @property
    def shown(self) -> str | None:
        """The text of the message in this part; None for a thought."""
        return {"text": self.text, "refusal": self.refusal}.get(self.type)

    @property
    def thought(self) -> str:
        """The thought in this part, or beside it."""
        if self.shown is not None:
            return self.reasoning_content or ""
        return next(filter(None, map(_thought_text, (self.thinking, self.reasoning, self.text or "", self.summary))), "")


def _thought_text(thought: Thought) -> str:
    return thought if isinstance(thought, str) else "".join(piece.text for piece in thought)


class Message(Body):
    """One message of a conversation; text parts are joined by newlines.

    An assistant message may contain calls, and the thinking before it. `function_call` and the role `function` are older spellings of
    `tool_calls` and `tool`; `reasoning` and `thinking` are other spellings of `reasoning_content`.
    """

    RULES = (
        any_of(lacks("function_call", tool_calls={"maxItems": 0}), has(role={"const": "assistant"})),
        any_of(
            has(content={"type": ["array", "string"], "minItems": 1}),
            has(role={"enum": list(MAY_BE_EMPTY)}),
        ),
        any_of(lacks(content={"items": {"properties": {"type": {"enum": list(SHOWN_PARTS)}}}}), has(role={"const": "assistant"})),
    )
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[MessagePart], items(0, MAX_MESSAGES)] | None = None
    name: Name | None = None
    tool_calls: CalledTools = Field(default_factory=list)
    tool_call_id: Name | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    cache_control: Unused = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if (self.tool_calls or self.function_call is not None) and self.role != "assistant":
            raise unsupported("tool_calls", "only the assistant calls tools")
        for i, part in enumerate(self.content if isinstance(self.content, list) and self.role != "assistant" else ()):
            if part.type not in SHOWN_PARTS:
                raise unsupported(f"content[{i}]", "only the assistant has thoughts")
        if self.content in (None, []) and self.role not in MAY_BE_EMPTY:
            raise PydanticCustomError("required", "required", {"field": "content"})
        return self

    @property
    def thought(self) -> str:
        """The thinking of an assistant message."""
        parts = self.content if isinstance(self.content, list) else ()
        return self.reasoning_content or self.reasoning or self.thinking or "\n".join(filter(None, (part.thought for part in parts)))

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "\n".join(part.shown for part in parts if part.shown is not None)

    def rendered(self) -> dict[str, Any]:
        """The message in the form that chat templates expect; `developer` is the newer name of `system`."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if calls := self.tool_calls or ([CalledTool(function=self.function_call)] if self.function_call is not None else []):
            message["tool_calls"] = [call.rendered() for call in calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.thought:
            message["reasoning_content"] = message["thinking"] = self.thought  # the template of gpt-oss reads the latter
        return message


def rendered_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages in the form that chat templates expect; results of calls get the name of their function."""
    names: dict[str, str] = {}
    shown = [message.rendered() for message in messages]
    for message in shown:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and (name := names.get(message.get("tool_call_id", ""))):
            message["name"] = name
    return shown


Messages = Annotated[list[Message], items(1, MAX_MESSAGES)]
