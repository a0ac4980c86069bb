"""Request and response bodies of SGLang's native endpoints and of administration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from annotated_types import Interval, Len
from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtime.entrypoints.http.body import (
    MAX_PROMPTS,
    Body,
    Choices,
    Int64,
    Name,
    RoutingFields,
    SamplingFields,
    Text,
    TokenId,
    TokenIds,
    TopLogprobs,
    Unused,
    items,
)
from runtime.entrypoints.http.field_rules import TEXT, TRUE, any_of, has, one_of
from runtime.entrypoints.openai.messages import Message, Messages
from runtime.entrypoints.openai.protocol import ChatBody, ModelName, ReasoningEffort, TemplateKwargs
from runtime.entrypoints.openai.tools import ToolChoice, Tools
from runtime.errors import InvalidField, RequestError
from runtime.sampling_params import MAX_DRAFT_STEPS, MAX_TOKENS, NO_DEFAULTS, MinNewTokens, SamplingDefaults, SamplingParams

DEFAULT_NEW_TOKENS = 128

MAX_RID_CHARS = 256
Rid = Annotated[str, Len(1, MAX_RID_CHARS)]
SampleId = Annotated[str, Len(0, MAX_RID_CHARS + len("-255-127"))]
"""A `Rid` with the numbers of a prompt and of a sample."""
IdLists = Annotated[
    TokenIds | Annotated[list[TokenIds], items(1, MAX_PROMPTS)],
    Field(description=f"an array of token ids, or an array of 1 to {MAX_PROMPTS} of these, none of them empty"),
]


PromptStart = Annotated[int, Interval(ge=-1, le=MAX_TOKENS)]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """The log-probabilities requested for one prompt.

    Attributes:
        top: how many of the most likely tokens to report at each position; -1 for no log-probabilities.
        start: the first prompt token whose log-probability is reported; -1 for none.
    """

    top: int
    start: int


# ---- requests


class NativeSampling(SamplingFields):
    """`sampling_params` of one prompt."""

    max_new_tokens: Annotated[int, Interval(ge=0, le=MAX_TOKENS)] = DEFAULT_NEW_TOKENS
    min_new_tokens: MinNewTokens = 0
    n: Choices = 1
    no_stop_trim: bool = False
    sampling_seed: Int64 | None = None

    @model_validator(mode="after")
    def _check_min_new_tokens(self) -> NativeSampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidField("sampling_params.min_new_tokens", self.min_new_tokens, f"at most max_new_tokens ({self.max_new_tokens})")
        return self

    def params(self, defaults: SamplingDefaults = NO_DEFAULTS) -> SamplingParams:
        """The engine's parameters; `sampling_seed` overrides `seed`."""
        sampling = self.sampling(max(self.max_new_tokens, 1), self.min_new_tokens, defaults)
        seed = sampling.seed if self.sampling_seed is None else self.sampling_seed
        return msgspec.structs.replace(sampling, seed=seed, no_stop_trim=self.no_stop_trim)

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is computed and nothing is generated."""
        return self.max_new_tokens == 0


class GenerateBody(RoutingFields):
    """A body of /generate: one prompt or several, as text or as token ids."""

    RULES = (one_of(has("text"), has("input_ids")),)

    text: Text | Annotated[list[Text], items(1, MAX_PROMPTS)] | None = None
    input_ids: IdLists | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], items(1, MAX_PROMPTS)] = NativeSampling()
    cache_salt: Name = ""
    logprob_start_len: PromptStart | Annotated[list[PromptStart], items(1, MAX_PROMPTS)] = -1
    model: ModelName | None = None
    priority: Int64 = 0
    return_logprob: bool | Annotated[list[bool], items(1, MAX_PROMPTS)] = False
    return_text_in_logprobs: bool = False
    rid: Rid | Annotated[list[Rid], items(1, MAX_PROMPTS)] | None = None
    stream: bool = False
    top_logprobs_num: TopLogprobs | Annotated[list[TopLogprobs], items(1, MAX_PROMPTS)] = 0

    @model_validator(mode="after")
    def _check_fields(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("Send either text or input_ids.", "text")
        count = len(self.prompts)
        for name in ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"):
            if isinstance(value := getattr(self, name), list) and len(value) != count:
                raise RequestError(f"{name} must hold one item per prompt: it has {len(value)}, and there are {count} prompts.", name)
        if len({one.n for one in self.samplings}) > 1:
            raise RequestError("sampling_params.n must be the same for all prompts of a call.", "sampling_params.n")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        given: Any = self.input_ids if self.text is None else self.text
        return [given] if self.one_prompt else given

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompts."""
        return "input_ids" if self.text is None else "text"

    @property
    def one_prompt(self) -> bool:
        """Whether the body has one prompt, not an array of prompts."""
        return isinstance(self.text, str) or (self.input_ids is not None and isinstance(self.input_ids[0], int))

    @property
    def single(self) -> bool:
        """Whether the answer is an object, not an array."""
        return self.one_prompt and self.n == 1

    @property
    def samplings(self) -> list[NativeSampling]:
        """One per prompt."""
        return self._each(self.sampling_params)

    @property
    def n(self) -> int:
        """Texts per prompt."""
        return self.samplings[0].n

    @cached_property
    def logprobs(self) -> list[AskedLogprobs]:
        """One per prompt."""
        columns = zip(self._each(self.return_logprob), self._each(self.top_logprobs_num), self._each(self.logprob_start_len), strict=True)
        return [AskedLogprobs(top, start) if wanted else AskedLogprobs(-1, -1) for wanted, top, start in columns]

    def _each(self, given: T | list[T]) -> list[T]:
        """One value per prompt."""
        return given if isinstance(given, list) else [given] * len(self.prompts)


class TokenizeBody(Body):
    """A body of /tokenize: a text, an array of texts, or a conversation."""

    RULES = (one_of(has("prompt"), has("messages")), {"not": has(continue_final_message=TRUE, add_generation_prompt=TRUE)})

    prompt: str | Annotated[list[str], items(1, MAX_PROMPTS)] | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    continue_final_message: bool = False
    model: ModelName | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool = False
    tool_choice: ToolChoice = "auto"
    tools: Tools = Field(default_factory=list)

    def chat(self, messages: list[Message]) -> ChatBody:
        """The chat body whose prompt is tokenised."""
        names = ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "reasoning_effort", "tool_choice", "tools")
        return ChatBody(messages=messages, **{name: getattr(self, name) for name in names})

    @model_validator(mode="after")
    def _check_fields(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", "prompt")
        if self.continue_final_message and self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise RequestError("continue_final_message requires add_generation_prompt: false.", "continue_final_message")
        return self


class DetokenizeBody(Body):
    """A body of /detokenize."""

    tokens: Annotated[
        list[TokenId] | Annotated[list[list[TokenId]], items(1, MAX_PROMPTS)],
        Field(description=f"an array of token ids, or an array of 1 to {MAX_PROMPTS} of these"),
    ]
    model: ModelName | None = None
    skip_special_tokens: bool = True


class AbortBody(Body):
    """A body of /abort_request."""

    RULES = (any_of(has(abort_all=TRUE), has(rid=TEXT)),)

    abort_all: bool = False
    rid: SampleId = ""

    @model_validator(mode="after")
    def _check_fields(self) -> AbortBody:
        if not self.abort_all and not self.rid:
            raise RequestError("rid is required unless abort_all is true.", "rid")
        return self


class InternalState(Body):
    """The settings that `StateBody` may change. Fields are named like the flags."""

    model_config = ConfigDict(extra="forbid")

    speculative_num_steps: Annotated[int, Field(ge=0, le=MAX_DRAFT_STEPS)] | Literal["auto"] | None = None
    speculative_synthetic_accept_length: (
        Annotated[float, Field(ge=1, le=MAX_DRAFT_STEPS + 1)] | Annotated[str, Field(max_length=256)] | None
    ) = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_settings(cls, data: Any) -> Any:
        if others := sorted(data.keys() - cls.model_fields) if isinstance(data, dict) else []:
            name, known = others[0][:64], " and ".join(cls.model_fields)
            raise RequestError(f"{name} cannot be changed while the server runs, only {known} can.", f"server_args.{name}")
        return data


class StateBody(Body):
    """A body of /set_internal_state, as SGLang's clients send it."""

    server_args: InternalState


class ProfileBody(Body):
    """A body of /start_profile and /stop_profile. The fields that SGLang's clients send have no effect."""

    activities: Unused = None
    merge_profiles: Unused = None
    output_dir: Unused = None
    profile_prefix: Unused = None
    record_shapes: Unused = None
    with_stack: Unused = None


# ---- responses


class StopReason(BaseModel):
    """A stop token or a stop text ended the output."""

    type: Literal["stop"]
    matched: int | str | None


class LengthReason(BaseModel):
    """The output reached its maximum length."""

    type: Literal["length"]
    length: int


class AbortReason(BaseModel):
    """The request was aborted."""

    type: Literal["abort"]
    message: str


Triple = tuple[float | None, int, str | None]


class MetaInfo(BaseModel):
    """Counts, log-probabilities and acceptance of one output. A triple is (log-probability, token id, text or null)."""

    model_config = ConfigDict(extra="forbid")

    id: str
    finish_reason: StopReason | LengthReason | AbortReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_time: float
    graph_hit_rate: float | None
    padding_waste: float | None
    e2e_latency: float | None = None
    input_token_logprobs: list[Triple] | None = None
    output_token_logprobs: list[Triple] | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None
    output_top_logprobs: list[list[Triple]] | None = None
    spec_verify_ct: int | None = None
    spec_accept_length: float | None = None
    spec_accept_rate: float | None = None
    spec_accept_token_num: int | None = None
    spec_draft_token_num: int | None = None
    spec_accepted_by_position: list[int] | None = None
    spec_drafted_by_position: list[int] | None = None


class Generated(BaseModel):
    """One output of /generate. In a stream of several outputs, `index` distinguishes them."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


class Tokenized(BaseModel):
    """The answer of /tokenize; arrays for several prompts. `token_strs` is present if `return_token_strs` is true."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None = None


class Detokenized(BaseModel):
    """The answer of /detokenize; an array for several lists. `prompt` repeats `text` under vLLM's name."""

    text: str | list[str]
    prompt: str | list[str]


class TokenizerInfo(BaseModel):
    """The answer of /tokenizer_info."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    bos_token_id: int | None
    eos_token_ids: list[int]
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class Done(BaseModel):
    """An administrative call succeeded."""

    success: Literal[True]


class Flushed(Done):
    """The prefix cache was emptied; it had `flushed_pages` pages."""

    flushed_pages: int


class ProfileStarted(Done):
    """A trace has started; its file will be in `folder`."""

    folder: str


class ProfileWritten(Done):
    """The trace was written to `file`."""

    file: str


class Status(BaseModel):
    """The server is healthy."""

    status: Literal["ok"]


class ModelInfo(BaseModel):
    """The model that is served."""

    model_config = ConfigDict(extra="allow")

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    architecture: str
    weights: str
    vocab_size: int
    max_context_len: int
    sampling_defaults: Literal["model", "openai"]
    default_sampling_params: dict[str, float]
    preferred_sampling_params: dict[str, float] | None
