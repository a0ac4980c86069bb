"""Request and response bodies of OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from runtime.entrypoints.http.body import (
    MAX_PROMPTS,
    Body,
    Choices,
    Int64,
    Name,
    RoutingFields,
    Text,
    TokenIds,
    TopLogprobs,
    Unused,
    entries,
    items,
)
from runtime.entrypoints.http.field_rules import TRUE, any_of, has, lacks
from runtime.entrypoints.openai.messages import Messages
from runtime.entrypoints.openai.structured import ConstrainedFields
from runtime.entrypoints.openai.tools import FunctionChoice, FunctionReference, Functions, ToolChoice, ToolReference, ToolRequest, Tools
from runtime.errors import InvalidField, RequestError
from runtime.managers.messages import FinishReason
from runtime.sampling_params import MAX_TOKENS, MinNewTokens, NewTokens
from runtime.text.chat_template import RESERVED

MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE = 65536
DEFAULT_COMPLETION_TOKENS = 16

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

ModelName = Annotated[str, Len(0, 4096)]
TemplateKwargs = Annotated[
    dict[
        str,
        bool | int | float | Annotated[str, Len(0, 1024)] | Annotated[list[Any], WithJsonSchema({"type": "array"})] | dict[str, Any] | None,
    ],
    Field(
        description=f"an object of at most {MAX_TEMPLATE_KWARGS} entries, whose values are JSON values other than strings of more than "
        "1024 characters"
    ),
    Field(json_schema_extra={"propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_]*$", "not": {"enum": [*sorted(RESERVED)]}}}),
    Len(0, MAX_TEMPLATE_KWARGS),
    entries(MAX_TEMPLATE_KWARGS),
    AfterValidator(lambda given: {name: value for name, value in given.items() if value is not None}),
]
Prompt = Annotated[
    Text | TokenIds | Annotated[list[Text | TokenIds], items(1, MAX_PROMPTS)],
    Field(description=f"a string, an array of token ids, or an array of 1 to {MAX_PROMPTS} of these, none of them empty"),
]


# ---- requests


class StreamOptions(Body):
    """What a stream reports in addition to its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(ConstrainedFields, RoutingFields):
    """The fields that chats and completions share."""

    RULES = (any_of(lacks(stream_options=lacks(*StreamOptions.model_fields)), has(stream=TRUE)),)

    cache_salt: Name = ""
    min_tokens: MinNewTokens = 0
    model: ModelName | None = None
    n: Choices = 1
    priority: Int64 = 0
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_control: Unused = None
    client_metadata: Unused = None
    metadata: Unused = None
    prediction: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
    rid: Unused = None
    safety_identifier: Unused = None
    service_tier: Unused = None
    session_id: Unused = None
    store: Unused = None
    stream_interval: Unused = None
    user: Unused = None
    verbosity: Unused = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> OpenAIBody:
        if self.stream_options.model_fields_set and not self.stream:
            raise RequestError("stream_options requires stream: true.", "stream_options")
        return self

    @property
    def wants_running_counts(self) -> bool:
        """Whether chunks before the last one report acceptance."""
        return self.return_spec_tokens_details and self.stream_options.continuous_usage_stats

    def _check_min_tokens(self, limit_name: str, limit: int) -> None:
        if self.min_tokens > limit:
            raise InvalidField("min_tokens", self.min_tokens, f"at most {limit_name} ({limit})")


class ChatBody(OpenAIBody):
    """A body of /v1/chat/completions."""

    RULES = (any_of(lacks(top_logprobs={"enum": [0, None]}), has(logprobs=TRUE)),)

    messages: Messages
    add_generation_prompt: bool = True
    chat_template: Annotated[str, Len(1, MAX_TEMPLATE)] | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    continue_final_message: bool = False
    function_call: FunctionChoice | None = None
    functions: Functions = Field(default_factory=list)
    logprobs: bool = False
    max_completion_tokens: NewTokens | None = None
    max_tokens: NewTokens | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    tool_choice: ToolChoice = "auto"
    tools: Tools = Field(default_factory=list)
    top_logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> ChatBody:
        if self.functions and self.tools:
            raise RequestError("functions is an older spelling of tools; send one of them.", "functions")
        self.tool_request()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs: true.", "top_logprobs")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise RequestError("continue_final_message requires a last message of role assistant.", "continue_final_message")
        self._check_min_tokens(self.limit_name, self.limit)
        return self

    def tool_request(self) -> ToolRequest:
        """The tools, and what the model may do with them."""
        if not self.functions:
            return ToolRequest.of([tool.function for tool in self.tools], self.tool_choice, self.parallel_tool_calls, "tool_choice")
        choice = self.function_call or "auto"
        if isinstance(choice, FunctionReference):
            choice = ToolReference(type="function", function=choice)
        return ToolRequest.of(self.functions, choice, False, "function_call")

    def template_kwargs(self) -> Mapping[str, object]:
        """The variables for the chat template, including `reasoning_effort`, which also determines whether the model thinks."""
        effort = self.reasoning_effort
        if effort is None:
            return self.chat_template_kwargs
        return {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none", **self.chat_template_kwargs}

    @property
    def thinks(self) -> bool:
        """Whether the model may think: false if the request switches reasoning off, and no variable of the template switches it on."""
        given = self.template_kwargs()
        switches = [given[name] for name in ("enable_thinking", "thinking") if name in given]
        return False not in switches or True in switches

    @property
    def limit_name(self) -> str:
        """The field that limits the output."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int:
        """The requested limit of output tokens; `MAX_TOKENS` if there is none."""
        return self.max_completion_tokens or self.max_tokens or MAX_TOKENS

    @property
    def fill_context(self) -> bool:
        """Whether the output may fill the context, because there is no limit."""
        return self.max_completion_tokens is None and self.max_tokens is None

    @property
    def top(self) -> int:
        """How many of the most likely tokens to report at each position; -1 for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else -1


class CompletionBody(OpenAIBody):
    """A body of /v1/completions."""

    RULES = (any_of(lacks(max_tokens={"not": {"const": 0}}), has(echo=TRUE)),)

    prompt: Prompt
    best_of: Choices | None = None
    echo: bool = False
    include_stop_str_in_output: bool = False
    logprobs: TopLogprobs | None = None
    max_tokens: Annotated[int, Interval(ge=0, le=MAX_TOKENS)] = DEFAULT_COMPLETION_TOKENS
    no_stop_trim: bool = False
    separate_reasoning: Unused = None
    stream_reasoning: Unused = None

    @model_validator(mode="after")
    def _check_fields(self) -> CompletionBody:
        if self.only_echo and not self.echo:
            raise RequestError("max_tokens must be at least 1; 0 requires echo: true.", "max_tokens")
        if self.candidates < self.n:
            raise InvalidField("best_of", self.candidates, f"at least n ({self.n})")
        if self.candidates > self.n and self.stream:
            raise InvalidField("best_of", self.candidates, f"equal to n ({self.n}) in a stream")
        self._check_min_tokens("max_tokens", max(self.max_tokens, 1))
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # pyright: ignore[reportReturnType]

    @property
    def candidates(self) -> int:
        """How many texts to generate per prompt; the best `n` are returned."""
        return self.best_of or self.n

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt is returned."""
        return self.max_tokens == 0

    @property
    def top(self) -> int:
        """How many of the most likely tokens to report at each position; -1 for no log-probabilities."""
        return -1 if self.logprobs is None else self.logprobs


# ---- responses


class ModelCard(BaseModel):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    weights: str
    default_sampling_params: dict[str, float]


class ModelList(BaseModel):
    """The models that this server serves: exactly one."""

    object: Literal["list"]
    data: list[ModelCard]


class CachedTokens(BaseModel):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokens(BaseModel):
    """Number of generated thinking tokens."""

    reasoning_tokens: int


class SpeculativeUsage(BaseModel):
    """Acceptance of all drafts of a call. Made from `SpecStats`."""

    model_config = ConfigDict(from_attributes=True)

    verify_steps: int
    drafted_tokens: int = Field(validation_alias="draft_tokens")
    accepted_tokens: int
    accept_length: float
    accept_rate: float | None
    accept_rate_by_position: list[float | None]
    mean_depth: float


class Usage(BaseModel):
    """Token counts of a call. Completion details exist for thinking models, `speculative` with `return_spec_tokens_details`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | None = None
    speculative: SpeculativeUsage | None = None


class CachedTokensDetails(BaseModel):
    """Where the cached prompt tokens were: `device` is the KV cache."""

    device: int
    host: int


class SpecTokensDetails(BaseModel):
    """Acceptance of one choice's drafts. Made from `SpecStats`.

    `spec_num_draft_positions` is the sum of the depths of all verify steps. The histogram counts verify steps by accepted drafts.
    """

    model_config = ConfigDict(from_attributes=True)

    spec_accept_rate: float | None = Field(validation_alias="accept_rate")
    spec_accept_length: float = Field(validation_alias="accept_length")
    spec_accept_rate_by_position: list[float | None] = Field(validation_alias="accept_rate_by_position")
    spec_num_correct_drafts: int = Field(validation_alias="accepted_tokens")
    spec_num_proposed_drafts: int = Field(validation_alias="draft_tokens")
    spec_num_draft_positions: int = Field(validation_alias="draft_positions")
    spec_verify_ct: int = Field(validation_alias="verify_steps")
    spec_correct_drafts_histogram: list[int] = Field(validation_alias="steps_by_accepted")


class SglExt(BaseModel):
    """SGLang's extension: the details requested by `return_cached_tokens_details` and `return_spec_tokens_details`."""

    cached_tokens_details: CachedTokensDetails | None = None
    spec_tokens_details: SpecTokensDetails | list[SpecTokensDetails] | None = None


class TokenLogprob(BaseModel):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A chosen token and the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat choice."""

    content: list[ChosenLogprob]
    refusal: None


class AnswerFunction(BaseModel):
    """A called function; `arguments` is the JSON text that the model wrote."""

    name: str
    arguments: str


class AnswerCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class ChatMessage(BaseModel):
    """The answer of a chat. Thinking and calls are present if the model produced any."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] | None = None
    function_call: AnswerFunction | None = None


ChatFinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call"]


class ChatChoice(BaseModel):
    """One answer of a chat. `matched_stop` is the stop text or the stop token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    matched_stop: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions. `token_ids` and `prompt_token_ids` come with `return_token_ids`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage
    sglext: SglExt | None = None


class CompletionLists(BaseModel):
    """Log-probabilities of a completion choice, as parallel lists. The first token of a prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion. `matched_stop` is the stop text or the stop token that ended it."""

    index: int
    text: str
    logprobs: CompletionLists | None
    finish_reason: FinishReason
    matched_stop: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    sglext: SglExt | None = None
