"""Request and response bodies of /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import BaseModel, Field, model_validator

from runtime.entrypoints.http.body import Body, Int64, Name, StopText, Unused, items
from runtime.entrypoints.http.field_rules import ITEMS, TEXT, any_of, has, lacks, type_needs
from runtime.entrypoints.openai.messages import LEFT_OUT, MAX_MESSAGES, TEXT_PARTS_ONLY
from runtime.entrypoints.openai.protocol import ModelName
from runtime.entrypoints.openai.response_protocol import Shown
from runtime.entrypoints.openai.tools import MAX_TOOLS, FunctionName, JsonSchema
from runtime.errors import RequestError
from runtime.sampling_params import MAX_STOPS, MAX_TOKENS, NewTokens, TopK, TopP

# ---- messages


class ResultBlock(Body):
    """A part of a tool result: text, or a reference to a tool that was found. Other parts are replaced by a note to the model."""

    OTHER_TYPES = TEXT_PARTS_ONLY

    type: Literal["text", "image", "document", "tool_reference"]
    text: str = ""
    tool_name: Name = ""
    cache_control: Unused = None
    citations: Unused = None
    context: Unused = None
    source: Unused = None
    title: Unused = None

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        match self.type:
            case "text":
                return self.text
            case "tool_reference":
                return f"The tool {self.tool_name} can be called now."
            case _:
                return LEFT_OUT.format(self.type)


class Block(Body):
    """A part of a message: text, thinking, a tool call or its result."""

    OTHER_TYPES = TEXT_PARTS_ONLY

    RULES = (type_needs("tool_use", "id", "input", name=TEXT), type_needs("tool_result", "tool_use_id"))

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    content: str | Annotated[list[ResultBlock], items(0, MAX_MESSAGES)] = ""
    id: Name | None = None
    input: Annotated[dict[str, Any], Field(description="an object")] | None = None
    is_error: bool = False
    name: Name | None = None
    text: str = ""
    thinking: str = ""
    tool_use_id: Name | None = None
    cache_control: Unused = None
    caller: Unused = None
    citations: Unused = None
    data: Unused = None
    signature: Unused = None

    @model_validator(mode="after")
    def _check_fields(self) -> Block:
        needed = {"tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise RequestError(f"{name} is required in a block of type {self.type}.", "messages")
        return self


Blocks = Annotated[list[Block], items(0, MAX_MESSAGES)]


class TextBlock(Body):
    """A part of the system prompt."""

    type: Literal["text"]
    text: str
    cache_control: Unused = None
    citations: Unused = None


TextBlocks = Annotated[list[TextBlock], items(0, MAX_MESSAGES)]


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


def text_of(content: str | Sequence[Block | TextBlock]) -> str:
    """The text of some blocks, joined."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


# ---- requests


class Tool(Body):
    """A tool that the model may use."""

    OTHER_TYPES = "send tools with an input_schema"

    name: FunctionName
    input_schema: JsonSchema
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] = "custom"
    cache_control: Unused = None
    defer_loading: Unused = None
    eager_input_streaming: Unused = None


class ToolChoice(Body):
    """Which tools the model may or must use."""

    RULES = (type_needs("tool", "name"),)

    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool = False
    name: Name | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise RequestError("tool_choice.name is required for type tool.", "tool_choice.name")
        return self


class Thinking(Body):
    """Whether the model thinks before it answers; the budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Interval(ge=1, le=MAX_TOKENS)] | None = None
    display: Unused = None


class OutputFormat(Body):
    """Constrains the answer to JSON that satisfies a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(Body):
    """The format of the answer and the reasoning effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """A body of /v1/messages/count_tokens."""

    RULES = (any_of(lacks(tool_choice={"properties": {"type": {"enum": ["auto", "none"]}}}), has(tools=ITEMS)),)

    messages: Annotated[list[Turn], items(1, MAX_MESSAGES)]
    model: ModelName | None = None
    output_config: OutputConfig = OutputConfig()
    system: str | TextBlocks | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], items(0, MAX_TOOLS)] = Field(default_factory=list)
    cache_control: Unused = None
    context_management: Unused = None


class MessagesBody(CountBody):
    """A body of /v1/messages."""

    max_tokens: NewTokens
    priority: Int64 = 0
    stop_sequences: Annotated[list[StopText], items(0, MAX_STOPS)] = Field(default_factory=list)
    stream: bool = False
    temperature: Annotated[float, Interval(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    metadata: Unused = None
    service_tier: Unused = None


# ---- responses


class ContentBlock(Shown):
    """One block of an answer."""

    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(Shown):
    """Token counts. `input_tokens` excludes cached prompt tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
