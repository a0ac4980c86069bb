"""Request and response bodies of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from runtime.entrypoints.http.body import Body, Int64, Name, SamplingFields, TopLogprobs, Unused, entries, items, unsupported_type
from runtime.entrypoints.http.field_rules import ITEMS, TEXT, any_of, has, lacks, type_needs
from runtime.entrypoints.openai.messages import LEFT_OUT, MAX_MESSAGES, TEXT_PARTS_ONLY
from runtime.entrypoints.openai.protocol import ModelName, ReasoningEffort, TemplateKwargs
from runtime.entrypoints.openai.tools import MAX_TOOLS, FunctionName, JsonSchema
from runtime.errors import RequestError, shown
from runtime.sampling_params import NewTokens

MAX_METADATA = 16
ItemType = Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"]
LOGPROBS = "message.output_text.logprobs"
Metadata = Annotated[
    dict[Annotated[str, Len(0, 64)], Annotated[str, Len(0, 512)]],
    Field(description=f"an object of at most {MAX_METADATA} entries of strings"),
    Len(0, MAX_METADATA),
    entries(MAX_METADATA),
]


# ---- items


class Part(Body):
    """A part of an item. Only text is supported."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str = ""
    annotations: Unused = None
    logprobs: Unused = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind.startswith(("input_", "output_")) and kind not in ("input_text", "output_text"):
            raise unsupported_type(kind, TEXT_PARTS_ONLY)
        return data

    @property
    def shown(self) -> str:
        """What the model reads."""
        return self.text or self.refusal


class ResultPart(Body):
    """A part of the output of a function. Images and files are replaced by a note to the model."""

    OTHER_TYPES = TEXT_PARTS_ONLY

    type: Literal["input_text", "output_text", "text", "input_image", "input_file"]
    text: str = ""
    annotations: Unused = None
    detail: Unused = None
    file_data: Unused = None
    file_id: Unused = None
    file_url: Unused = None
    filename: Unused = None
    image_url: Unused = None
    logprobs: Unused = None

    @property
    def shown(self) -> str:
        """What the model reads."""
        return LEFT_OUT.format(self.type.removeprefix("input_")) if self.type in ("input_image", "input_file") else self.text


Parts = Annotated[list[Part], items(0, MAX_MESSAGES)]


class InputItem(Body):
    """One item of a conversation: a message, a function call or its output, reasoning, or a reference to a stored item."""

    OTHER_TYPES = f"use one of {', '.join(map(shown, get_args(ItemType)))}"
    RULES = (
        any_of(has(type={"enum": ["function_call", "function_call_output", "reasoning", "item_reference"]}), has("role")),
        type_needs("item_reference", "id"),
        type_needs("function_call", "call_id", "arguments", name=TEXT),
        type_needs("function_call_output", "call_id", "output"),
    )

    type: ItemType = "message"
    arguments: str | None = None
    call_id: Name | None = None
    content: str | Parts = Field(default_factory=list)
    id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    output: str | Annotated[list[ResultPart], items(0, MAX_MESSAGES)] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    summary: Parts = Field(default_factory=list)
    encrypted_content: Unused = None
    phase: Unused = None
    status: Unused = None

    @model_validator(mode="after")
    def _check_fields(self) -> InputItem:
        needed = {
            "message": ("role",),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "item_reference": ("id",),
        }
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise RequestError(f"{name} is required in an input item of type {self.type}.", "input")
        return self


def text_of(content: str | Sequence[Part | ResultPart]) -> str:
    """The text of some parts, joined."""
    return content if isinstance(content, str) else "".join(part.shown for part in content)


# ---- requests


class FunctionTool(Body):
    """A function that the model may call."""

    OTHER_TYPES = 'use "function"'

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class ResponseTool(FunctionTool):
    """A function, a namespace of functions, or OpenAI's web search, which is accepted but hidden from the model."""

    OTHER_TYPES = 'use "function" or "namespace"'
    RULES = (
        any_of(has(type={"enum": ["web_search", "web_search_preview"]}), has("name")),
        type_needs("namespace", tools=ITEMS),
    )

    type: Literal["function", "namespace", "web_search", "web_search_preview"]  # pyright: ignore[reportIncompatibleVariableOverride]
    name: FunctionName = Field(default_factory=str)
    tools: Annotated[list[FunctionTool], items(0, MAX_TOOLS)] = Field(default_factory=list)
    external_web_access: Unused = None
    filters: Unused = None
    search_context_size: Unused = None
    user_location: Unused = None

    @model_validator(mode="after")
    def _check_fields(self) -> ResponseTool:
        needed = {"function": ("name",), "namespace": ("name", "tools")}
        for name in needed.get(self.type, ()):
            if not getattr(self, name):
                raise PydanticCustomError("required", "required", {"field": name})
        return self


class ChosenTool(Body):
    """A choice among the tools: one function, or some of them."""

    RULES = (type_needs("function", name=TEXT), type_needs("allowed_tools", tools=ITEMS))

    type: Literal["function", "allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    name: Name | None = None
    tools: Annotated[list[AllowedTool], items(0, MAX_TOOLS)] = Field(default_factory=list)


class AllowedTool(Body):
    """One of the tools that may be called."""

    type: Literal["function"] = "function"
    name: Name


class TextFormat(Body):
    """The format of the answer: free text, any JSON object, or JSON that satisfies a schema."""

    RULES = (type_needs("json_schema", "schema"),)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Len(0, 64)] | None = None
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The field `text` of a request."""

    format: TextFormat = TextFormat()
    verbosity: Unused = None


class ReasoningOptions(Body):
    """The field `reasoning` of a request."""

    effort: ReasoningEffort | None = None
    context: Unused = None
    generate_summary: Unused = None
    summary: Unused = None


class ResponseStreamOptions(Body):
    """The field `stream_options` of a request; streams are never obfuscated."""

    include_obfuscation: Unused = None


class ResponseBody(SamplingFields):
    """A body of /v1/responses."""

    RULES = (any_of(lacks(tool_choice={"enum": [None, "auto", "none"]}), has(tools=ITEMS)),)
    ALSO_REFUSED: ClassVar[Mapping[str, str]] = {
        "background": "this server answers while the client waits, or streams",
        "conversation": "send previous_response_id or the whole conversation",
        "max_completion_tokens": "send max_output_tokens",
        "max_tokens": "send max_output_tokens",
        "prompt": "this server stores no prompts",
        "response_format": "send text.format",
    }

    input: str | Annotated[list[InputItem], items(1, MAX_MESSAGES)]
    cache_salt: Name = ""
    chat_template_kwargs: TemplateKwargs | None = None
    include: Annotated[list[Annotated[str, Len(1, 64)]], items(0, 16)] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    metadata: Metadata = Field(default_factory=dict)
    model: ModelName | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Name | None = None
    priority: Int64 = 0
    reasoning: ReasoningOptions = ReasoningOptions()
    store: bool = True
    stream: bool = False
    text: TextOptions = TextOptions()
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    tools: Annotated[list[ResponseTool], items(0, MAX_TOOLS)] = Field(default_factory=list)
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    max_tool_calls: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
    safety_identifier: Unused = None
    service_tier: Unused = None
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    user: Unused = None

    @property
    def input_items(self) -> list[InputItem]:
        """The input as items."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def logprobs(self) -> bool:
        """Whether the request asks for log-probabilities of the text."""
        return LOGPROBS in self.include or self.top_logprobs is not None


# ---- responses


class Shown(BaseModel):
    """Base of answers: declared fields are validated, other fields are allowed."""

    model_config = ConfigDict(extra="allow")


class OutputItem(Shown):
    """One item of the output: reasoning, a message or a function call."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(Shown):
    """Token counts of a response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(Shown):
    """A response: the fields of its request, its status and its output."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None


class ResponseDeleted(BaseModel):
    """A response was removed from the store."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(BaseModel):
    """A page of the input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
