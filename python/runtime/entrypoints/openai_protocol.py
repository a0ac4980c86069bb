"""OpenAI request bodies, checked: what is not supported is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.entrypoints.fields import Fields, Flag, Kind, Listed, Real, Text, Whole, refusal
from runtime.errors import InvalidField, UnsupportedField
from runtime.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    TOP_K_ALL,
    SamplingParams,
)

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TOKENS = (1 << 31) - 1
MAX_NAME = 256
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE = 65536
DEFAULT_COMPLETION_TOKENS = 16
INT64 = 1 << 63
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
        "truncation",
    }
)

LATER = "this server does not support it yet"
REFUSED = {
    "audio": "this server answers with text only",
    "chat_template": "a template from a request is refused; start the server with --trust-request-chat-template to accept it",
    "function_call": LATER,
    "functions": LATER,
    "guided_choice": LATER,
    "guided_grammar": LATER,
    "guided_json": LATER,
    "guided_regex": LATER,
    "lora_path": LATER,
    "metadata": "this server stores nothing",
    "modalities": "this server answers with text only",
    "parallel_tool_calls": LATER,
    "prediction": LATER,
    "reasoning_effort": LATER,
    "response_format": LATER,
    "service_tier": "this server has one tier",
    "store": "this server stores nothing",
    "suffix": "this server does not fill in the middle",
    "tool_choice": LATER,
    "tools": LATER,
    "verbosity": LATER,
    "web_search_options": "this server opens no connections",
}
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
}
MEDIA = "only text parts are supported; this server opens no URL and no file"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """What chat and completion requests share.

    Attributes:
        model: the model asked for, or None.
        top_logprobs: -1 for none, else how many beside the chosen token.
        fill_context: no length was asked for: generate to the end of the context.
    """

    model: str | None
    sampling: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    top_logprobs: int
    fill_context: bool
    priority: int
    cache_salt: str
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(OpenAIRequest):
    """A body of /v1/chat/completions; a message is a role and a text. `limit_name`: which of its two names the length came by."""

    limit_name: str
    messages: list[dict[str, str]]
    chat_template: str | None
    template_kwargs: dict[str, object]
    continue_final_message: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(OpenAIRequest):
    """A body of /v1/completions. `drop_output`: only the echoed prompt was asked for (`max_tokens` 0)."""

    prompts: list[str | list[int]]
    echo: bool
    best_of: int
    drop_output: bool


# ---- kinds of field that only this protocol has


@dataclass(frozen=True, slots=True)
class TokenBias:
    """`logit_bias`: an object from token id to a number."""

    def read(self, name: str, value: object) -> dict[int, float]:
        """Bias by token id."""
        if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
            raise refusal(name, value, f"an object of at most {MAX_LOGIT_BIAS} entries")
        bias = Real(-100.0, 100.0)
        return {self._token(name, key): bias.read(name, each) for key, each in value.items()}

    def _token(self, name: str, key: str) -> int:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise refusal(f"{name} key", key, "a token id")
        return int(key)

    def schema(self) -> dict[str, object]:
        """An object of bounded numbers."""
        return {"type": "object", "maxProperties": MAX_LOGIT_BIAS, "additionalProperties": Real(-100.0, 100.0).schema()}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids, checked without a call per id; the vocabulary's size is the manager's to check."""

    def read(self, name: str, value: object) -> list[int]:
        """The ids."""
        if not isinstance(value, list) or not value:
            raise refusal(name, value, "a list of at least one token id")
        if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKENS:
            odd = next(one for one in value if type(one) is not int or not 0 <= one <= MAX_TOKENS)
            raise refusal(name, odd, "made of token ids of the vocabulary")
        return value

    def schema(self) -> dict[str, object]:
        """An array of integers."""
        return {"type": "array", "items": Whole(0, MAX_TOKENS).schema(), "minItems": 1}


@dataclass(frozen=True, slots=True)
class Prompts:
    """`prompt`: a text, a list of texts, token ids, or a list of lists of ids."""

    def read(self, name: str, value: object) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(value, str):
            return [self._text(name, value)]
        if not isinstance(value, list) or not value:
            raise refusal(name, value, "a text, token ids, or a list of either, not empty")
        if not isinstance(value[0], (str, list)):
            return [TokenIds().read(name, value)]
        if len(value) > MAX_PROMPTS:
            raise refusal(name, value, f"at most {MAX_PROMPTS} prompts in one call")
        return [self._text(name, one) if isinstance(one, str) else TokenIds().read(name, one) for one in value]

    def _text(self, name: str, value: str) -> str:
        if not value:
            raise refusal(name, value, "at least one character long")
        return value

    def schema(self) -> dict[str, object]:
        """Any of the four forms."""
        text, ids = Text(low=1).schema(), TokenIds().schema()
        lists = [{"type": "array", "items": each, "minItems": 1, "maxItems": MAX_PROMPTS} for each in (text, ids)]
        return {"anyOf": [text, ids, *lists]}


@dataclass(frozen=True, slots=True)
class Nested:
    """An object with fields of its own."""

    fields: Fields

    def read(self, name: str, value: object) -> dict[str, object]:
        """The fields given."""
        return self.fields.read(value, prefix=f"{name}.")

    def schema(self) -> dict[str, object]:
        """The object's schema."""
        return self.fields.schema()


@dataclass(frozen=True, slots=True)
class Content:
    """A message's content: a text, or a list of text parts, which are joined by newlines."""

    def read(self, name: str, value: object) -> str:
        """The text."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
            raise refusal(name, value, f"a text, or a list of 1 to {MAX_MESSAGES} text parts")
        return "\n".join(self._part(f"{name}[{i}]", part) for i, part in enumerate(value))

    def _part(self, name: str, part: object) -> str:
        if not isinstance(part, dict):
            raise refusal(name, part, "an object with type and text")
        kind = part.get("type")
        if kind != "text":
            shown = kind[:32] if isinstance(kind, str) else "type"
            raise UnsupportedField(f"{name}.{shown}", MEDIA)
        return str(TEXT_PART.read(part, prefix=f"{name}.")["text"])

    def schema(self) -> dict[str, object]:
        """A string, or an array of text parts."""
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART.schema(), "minItems": 1, "maxItems": MAX_MESSAGES}]}


@dataclass(frozen=True, slots=True)
class Role:
    """Who speaks; `developer` is today's name of `system`."""

    def read(self, name: str, value: object) -> str:
        """The role as templates know it."""
        if value in ("tool", "function"):
            raise UnsupportedField(name, f"{value!r} messages need tools, and {LATER}")
        if value not in ("system", "developer", "user", "assistant"):
            raise refusal(name, value, "one of system, developer, user, assistant")
        return "system" if value == "developer" else str(value)

    def schema(self) -> dict[str, object]:
        """The four roles."""
        return {"enum": ["system", "developer", "user", "assistant"]}


@dataclass(frozen=True, slots=True)
class Messages:
    """`messages`: at least one."""

    def read(self, name: str, value: object) -> list[dict[str, str]]:
        """Role and text of each."""
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
            raise refusal(name, value, f"a list of 1 to {MAX_MESSAGES} messages")
        return [{key: str(text) for key, text in MESSAGE.read(one, prefix=f"{name}[{i}].").items()} for i, one in enumerate(value)]

    def schema(self) -> dict[str, object]:
        """An array of messages."""
        return {"type": "array", "items": MESSAGE.schema(), "minItems": 1, "maxItems": MAX_MESSAGES}


@dataclass(frozen=True, slots=True)
class TemplateKwargs:
    """`chat_template_kwargs`: short plain values, under names that the renderer does not use itself."""

    def read(self, name: str, value: object) -> dict[str, object]:
        """The kwargs."""
        if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
            raise refusal(name, value, f"an object of at most {MAX_TEMPLATE_KWARGS} entries")
        return {self._key(name, key): self._value(f"{name}.{key[:64]}", each) for key, each in value.items()}

    def _key(self, name: str, key: str) -> str:
        if key in RESERVED_KWARGS or not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise refusal(f"{name} key", key, "a name of the template's own")
        return key

    def _value(self, name: str, value: object) -> object:
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 1024):
            return value
        raise refusal(name, value, "true, false, a number, or a string of at most 1024 characters")

    def schema(self) -> dict[str, object]:
        """An object of plain values."""
        plain = {"type": ["boolean", "number", "string"]}
        return {"type": "object", "maxProperties": MAX_TEMPLATE_KWARGS, "additionalProperties": plain}


EMPTY_EXTRAS: Mapping[str, tuple[object, ...]] = {"annotations": ([],), "tool_calls": ([],)}
TEXT_PART = Fields({"type": Text(16), "text": Text()}, required=("type", "text"))
MESSAGE = Fields(
    {"role": Role(), "content": Content(), "name": Text(MAX_NAME)},
    required=("role", "content"),
    refused=dict.fromkeys(("annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_call_id", "tool_calls"), LATER),
    harmless=EMPTY_EXTRAS,
)
STREAM_OPTIONS = Fields(
    {"include_usage": Flag(), "continuous_usage_stats": Flag()},
    refused={"include_obfuscation": LATER},
    harmless={"include_obfuscation": (False,)},
)

SAMPLING: dict[str, Kind] = {
    "frequency_penalty": Real(-2.0, 2.0),
    "ignore_eos": Flag(),
    "logit_bias": TokenBias(),
    "min_p": Real(0.0, 1.0),
    "min_tokens": Whole(0, MAX_TOKENS),
    "presence_penalty": Real(-2.0, 2.0),
    "repetition_penalty": Real(0.0, 10.0, open_low=True),
    "seed": Whole(-INT64, INT64 - 1),
    "skip_special_tokens": Flag(),
    "stop": Listed(Text(MAX_STOP_CHARS, low=1), MAX_STOPS, lone=True),
    "stop_token_ids": Listed(Whole(0, MAX_TOKENS), MAX_STOP_IDS),
    "temperature": Real(0.0, 100.0),
    "top_k": Whole(-1, TOP_K_ALL),
    "top_p": Real(0.0, 1.0, open_low=True),
}
SHARED: dict[str, Kind] = {
    **SAMPLING,
    "cache_salt": Text(MAX_NAME),
    "model": Text(4096),
    "n": Whole(1, MAX_N),
    "priority": Whole(-INT64, INT64 - 1),
    "return_token_ids": Flag(),
    "stream": Flag(),
    "stream_options": Nested(STREAM_OPTIONS),
    "user": Text(4096),
}
CHAT = Fields(
    {
        **SHARED,
        "chat_template_kwargs": TemplateKwargs(),
        "continue_final_message": Flag(),
        "logprobs": Flag(),
        "max_completion_tokens": Whole(1, MAX_TOKENS),
        "max_tokens": Whole(1, MAX_TOKENS),
        "messages": Messages(),
        "top_logprobs": Whole(0, MAX_TOP_LOGPROBS),
    },
    required=("messages",),
    refused=REFUSED,
    harmless=HARMLESS,
)
TRUSTING_CHAT = Fields({**CHAT.kinds, "chat_template": Text(MAX_TEMPLATE, low=1)}, CHAT.required, CHAT.refused, CHAT.harmless)
COMPLETION = Fields(
    {
        **SHARED,
        "best_of": Whole(1, MAX_N),
        "echo": Flag(),
        "logprobs": Whole(0, MAX_TOP_LOGPROBS),
        "max_tokens": Whole(0, MAX_TOKENS),
        "prompt": Prompts(),
    },
    required=("prompt",),
    refused=REFUSED,
    harmless=HARMLESS,
)


# ---- bodies


def parse_chat(body: object, *, trust_template: bool = False) -> ChatRequest:
    """Check a body of /v1/chat/completions.

    Raises:
        InvalidField, UnsupportedField: what is wrong, by name.
    """
    given = Given((TRUSTING_CHAT if trust_template else CHAT).read(body))
    limit = given.whole("max_completion_tokens", given.whole("max_tokens", 0))
    want_logprobs = given.flag("logprobs")
    if given.has("top_logprobs") and not want_logprobs:
        raise InvalidField("top_logprobs", given.whole("top_logprobs", 0), "left out unless logprobs is true")
    messages = given.values["messages"]
    assert isinstance(messages, list)
    if given.flag("continue_final_message") and messages[-1]["role"] != "assistant":
        raise InvalidField("continue_final_message", True, "false unless the last message is the assistant's")
    kwargs = given.values.get("chat_template_kwargs", {})
    assert isinstance(kwargs, dict)
    return ChatRequest(
        limit_name="max_completion_tokens" if given.has("max_completion_tokens") else "max_tokens",
        messages=messages,
        chat_template=given.text("chat_template"),
        template_kwargs=kwargs,
        continue_final_message=given.flag("continue_final_message"),
        fill_context=limit == 0,
        top_logprobs=given.whole("top_logprobs", 0) if want_logprobs else -1,
        **given.shared(limit or MAX_TOKENS),  # pyright: ignore[reportArgumentType]
    )


def parse_completion(body: object) -> CompletionRequest:
    """Check a body of /v1/completions.

    Raises:
        InvalidField, UnsupportedField: what is wrong, by name.
    """
    given = Given(COMPLETION.read(body))
    limit = given.whole("max_tokens", DEFAULT_COMPLETION_TOKENS)
    echo = given.flag("echo")
    if limit == 0 and not echo:
        raise InvalidField("max_tokens", 0, "at least 1, or 0 together with echo")
    shared = given.shared(max(limit, 1))
    n, best_of = given.whole("n", 1), given.whole("best_of", given.whole("n", 1))
    if best_of < n:
        raise InvalidField("best_of", best_of, f"at least n, which is {n}")
    if best_of > n and given.flag("stream"):
        raise InvalidField("best_of", best_of, f"equal to n ({n}) in a stream")
    prompts = given.values["prompt"]
    assert isinstance(prompts, list)
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        best_of=best_of,
        drop_output=limit == 0,
        fill_context=False,
        top_logprobs=given.whole("logprobs", -1),
        **shared,  # pyright: ignore[reportArgumentType]
    )


class Given:
    """Checked fields, with defaults."""

    def __init__(self, values: dict[str, object]) -> None:
        self.values = values

    def has(self, name: str) -> bool:
        """Whether the request gives the field."""
        return name in self.values

    def whole(self, name: str, default: int) -> int:
        """A whole number."""
        value = self.values.get(name, default)
        assert isinstance(value, int)
        return value

    def flag(self, name: str) -> bool:
        """A flag, false by default."""
        return self.values.get(name, False) is True

    def text(self, name: str) -> str | None:
        """A string, None by default."""
        value = self.values.get(name)
        assert value is None or isinstance(value, str)
        return value

    def shared(self, max_tokens: int) -> dict[str, object]:
        """The arguments that both kinds of `OpenAIRequest` take."""
        options = self.values.get("stream_options", {})
        assert isinstance(options, dict)
        if options and not self.flag("stream"):
            raise InvalidField("stream_options", options, "left out unless stream is true")
        return {
            "model": self.text("model"),
            "sampling": sampling_params({**self.values, "max_new_tokens": max_tokens}),
            "n": self.whole("n", 1),
            "stream": self.flag("stream"),
            "include_usage": options.get("include_usage", False),
            "continuous_usage": options.get("continuous_usage_stats", False),
            "priority": self.whole("priority", 0),
            "cache_salt": self.text("cache_salt") or "",
            "return_token_ids": self.flag("return_token_ids"),
        }


def sampling_params(values: Mapping[str, object]) -> SamplingParams:
    """Build `SamplingParams` from checked fields; `max_new_tokens` must be among them."""
    chosen = {name: values[name] for name in SAMPLING if name in values and name != "min_tokens"}
    limit, least = values["max_new_tokens"], values.get("min_tokens", 0)
    assert isinstance(limit, int)
    assert isinstance(least, int)
    if least > limit:
        raise InvalidField("min_tokens", least, f"at most max_tokens, which is {limit}")
    return SamplingParams(max_new_tokens=limit, min_new_tokens=least, **chosen)  # pyright: ignore[reportArgumentType]
