"""SGLang's native request bodies, checked: /generate, /tokenize, /detokenize and the administrative calls."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.entrypoints.fields import Fields, Flag, Kind, Listed, Text, Whole, refusal
from runtime.entrypoints.openai_protocol import (
    INT64,
    LATER,
    MAX_NAME,
    MAX_PROMPTS,
    MAX_TOKENS,
    SAMPLING,
    Given,
    Messages,
    TemplateKwargs,
    TokenIds,
    sampling_params,
)
from runtime.errors import InvalidField
from runtime.sampling_params import MAX_N, MAX_TOP_LOGPROBS, SamplingParams

DEFAULT_NEW_TOKENS = 128
NO_MEDIA = "this server takes text only, and opens no URL and no file"
NATIVE_SAMPLING = Fields(
    {
        **{name: kind for name, kind in SAMPLING.items() if name != "min_tokens"},
        "max_new_tokens": Whole(1, MAX_TOKENS),
        "min_new_tokens": Whole(0, MAX_TOKENS),
        "n": Whole(1, MAX_N),
        "sampling_seed": Whole(-INT64, INT64 - 1),
    },
    refused=dict.fromkeys(
        ("custom_params", "ebnf", "json_schema", "no_stop_trim", "regex", "spaces_between_special_tokens", "stop_regex", "structural_tag"),
        LATER,
    ),
    harmless={"no_stop_trim": (False,), "spaces_between_special_tokens": (True,)},
)


@dataclass(frozen=True, slots=True)
class OneOrMore:
    """One value, or a list of one a prompt; which it was is kept."""

    each: Kind

    def read(self, name: str, value: object) -> object:
        """The value, or a tuple."""
        if isinstance(value, list):
            return Listed(self.each, MAX_PROMPTS, low=1).read(name, value)
        return self.each.read(name, value)

    def schema(self) -> dict[str, object]:
        """Either form."""
        return Listed(self.each, MAX_PROMPTS, low=1, lone=True).schema()


@dataclass(frozen=True, slots=True)
class Sampling:
    """`sampling_params`: an object."""

    def read(self, name: str, value: object) -> dict[str, object]:
        """The fields given."""
        return NATIVE_SAMPLING.read(value, prefix=f"{name}.")

    def schema(self) -> dict[str, object]:
        """The object's schema."""
        return NATIVE_SAMPLING.schema()


@dataclass(frozen=True, slots=True)
class IdLists:
    """Token ids, or a list of lists of them."""

    def read(self, name: str, value: object) -> list[list[int]] | list[int]:
        """The ids, flat if given flat."""
        if not isinstance(value, list) or not value:
            raise refusal(name, value, "token ids, or a list of lists of them, not empty")
        if not isinstance(value[0], list):
            return TokenIds().read(name, value)
        if len(value) > MAX_PROMPTS:
            raise refusal(name, value, f"at most {MAX_PROMPTS} lists in one call")
        return [TokenIds().read(name, one) for one in value]

    def schema(self) -> dict[str, object]:
        """Either form."""
        ids = TokenIds().schema()
        return {"anyOf": [ids, {"type": "array", "items": ids, "minItems": 1, "maxItems": MAX_PROMPTS}]}


GENERATE = Fields(
    {
        "cache_salt": Text(MAX_NAME),
        "input_ids": IdLists(),
        "logprob_start_len": Whole(-1, MAX_TOKENS),
        "priority": Whole(-INT64, INT64 - 1),
        "return_logprob": Flag(),
        "return_text_in_logprobs": Flag(),
        "rid": OneOrMore(Text(MAX_NAME, low=1)),
        "sampling_params": OneOrMore(Sampling()),
        "stream": Flag(),
        "text": OneOrMore(Text(low=1)),
        "top_logprobs_num": Whole(0, MAX_TOP_LOGPROBS),
    },
    refused={
        **dict.fromkeys(("audio_data", "image_data", "video_data"), NO_MEDIA),
        **dict.fromkeys(
            (
                "custom_logit_processor",
                "input_embeds",
                "lora_path",
                "return_hidden_states",
                "return_routed_experts",
                "session_params",
                "token_ids_logprob",
            ),
            LATER,
        ),
    },
    harmless={"image_data": ([], ""), "return_hidden_states": (False,), "return_routed_experts": (False,)},
)
TOKENIZE = Fields(
    {
        "add_generation_prompt": Flag(),
        "add_special_tokens": Flag(),
        "chat_template_kwargs": TemplateKwargs(),
        "messages": Messages(),
        "model": Text(4096),
        "prompt": OneOrMore(Text()),
    }
)
DETOKENIZE = Fields({"model": Text(4096), "skip_special_tokens": Flag(), "tokens": IdLists()}, required=("tokens",))
ABORT = Fields({"abort_all": Flag(), "rid": Text(MAX_NAME)})
PROFILE = Fields(
    {},
    refused={
        "output_dir": "the folder is the server's own choice, --profile",
        **dict.fromkeys(("activities", "num_steps", "profile_by_stage", "record_shapes", "start_step", "with_stack"), LATER),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest:
    """A body of /generate, one entry a prompt in the lists. `single`: one answer is owed, not a list of them. `call`: one `rid` for all."""

    prompts: list[str | list[int]]
    single: bool
    sampling: list[SamplingParams]
    n: int
    rids: list[str] | None
    call: str
    stream: bool
    top_logprobs: int
    prompt_logprobs_from: int
    texts_in_logprobs: bool
    priority: int
    cache_salt: str


def parse_generate(body: object) -> NativeRequest:
    """Check a body of /generate.

    Raises:
        InvalidField, UnsupportedField: what is wrong, by name.
    """
    given = Given(GENERATE.read(body))
    prompts, lone = _prompts(given.values)
    asked = _spread("sampling_params", given.values.get("sampling_params", {}), len(prompts))
    counts = {Given(one).whole("n", 1) for one in asked}
    if len(counts) > 1:
        raise InvalidField("sampling_params.n", sorted(counts), "the same for every prompt of a call")
    n = counts.pop()
    wants = given.flag("return_logprob")
    return NativeRequest(
        prompts=prompts,
        single=lone and n == 1,
        sampling=[_sampling(Given(one)) for one in asked],
        n=n,
        rids=_rids(given.values.get("rid"), len(prompts)),
        call=rid if isinstance(rid := given.values.get("rid"), str) else "",
        stream=given.flag("stream"),
        top_logprobs=given.whole("top_logprobs_num", 0) if wants else -1,
        prompt_logprobs_from=given.whole("logprob_start_len", -1) if wants else -1,
        texts_in_logprobs=given.flag("return_text_in_logprobs"),
        priority=given.whole("priority", 0),
        cache_salt=given.text("cache_salt") or "",
    )


def _prompts(given: dict[str, object]) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether one was given alone."""
    text, ids = given.get("text"), given.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidField("text", "given" if text is not None else None, "given, or input_ids, but not both")
    if isinstance(text, str):
        return [text], True
    if isinstance(text, tuple):
        return list(text), False
    assert isinstance(ids, list)
    return (list(ids), False) if isinstance(ids[0], list) else ([ids], True)


def _spread(name: str, value: object, count: int) -> list[dict[str, object]]:
    """One object a prompt."""
    many = list(value) if isinstance(value, tuple) else [value] * count
    if len(many) != count:
        raise InvalidField(name, f"{len(many)} objects", f"one object, or one for each of the {count} prompts")
    return [one for one in many if isinstance(one, dict)]


def _rids(value: object, count: int) -> list[str] | None:
    if value is None:
        return None
    rids = [str(one) for one in value] if isinstance(value, tuple) else [str(value)]
    if isinstance(value, str) and count > 1:
        rids = [f"{value}-{i}" for i in range(count)]
    if len(rids) != count:
        raise InvalidField("rid", f"{len(rids)} names", f"one name, or one for each of the {count} prompts")
    return rids


def _sampling(asked: Given) -> SamplingParams:
    limit, least = asked.whole("max_new_tokens", DEFAULT_NEW_TOKENS), asked.whole("min_new_tokens", 0)
    if least > limit:
        raise InvalidField("sampling_params.min_new_tokens", least, f"at most max_new_tokens, which is {limit}")
    seed = asked.values.get("sampling_seed", asked.values.get("seed"))
    return sampling_params({**asked.values, "min_tokens": least, "max_new_tokens": limit, "seed": seed})
