"""Request bodies: which are accepted, which are refused, and how the refusal reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime.constrained.json_schema import deeper_than
from runtime.entrypoints.http.body_schema import BodySchema, read_body
from runtime.entrypoints.http.limits import parse_json
from runtime.entrypoints.http.refused import HARMLESS, REFUSED
from runtime.entrypoints.native.protocol import GenerateBody, NativeSampling
from runtime.entrypoints.openai.protocol import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody
from runtime.errors import InvalidField, RequestError, UnsupportedField, UnsupportedType
from runtime.sampling_params import MAX_DRAFT_STEPS, SamplingParams

FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


def parse_chat(body: object) -> ChatBody:
    return read_body(ChatBody, body)


def parse_completion(body: object) -> CompletionBody:
    return read_body(CompletionBody, body)


def parse_generate(body: object) -> GenerateBody:
    return read_body(GenerateBody, body)


def chat(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields: object) -> dict[str, object]:
    return {"prompt": "hi", **fields}


def test_every_documented_field_is_read() -> None:
    asked = parse_chat(
        chat(
            cache_salt="s",
            chat_template_kwargs={"think": False},
            frequency_penalty=0.5,
            ignore_eos=True,
            logit_bias={"7": -3},
            logprobs=True,
            max_completion_tokens=9,
            min_p=0.1,
            min_tokens=2,
            model="m",
            n=3,
            presence_penalty=-0.5,
            priority=4,
            repetition_penalty=1.5,
            return_token_ids=True,
            seed=-5,
            skip_special_tokens=False,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            temperature=0,
            top_k=5,
            top_logprobs=4,
            top_p=0.5,
            user="u",
        )
    )
    s = asked.sampling(asked.limit, asked.min_tokens)
    assert (s.frequency_penalty, s.presence_penalty, s.repetition_penalty, s.min_p, s.top_p, s.temperature) == (
        0.5,
        -0.5,
        1.5,
        0.1,
        0.5,
        0.0,
    )
    assert (s.max_new_tokens, s.min_new_tokens, s.top_k, s.seed, s.ignore_eos, s.skip_special_tokens) == (9, 2, 5, -5, True, False)
    assert (s.stop, s.stop_token_ids, s.logit_bias) == (("a", "b"), (1, 2), {7: -3.0})
    assert (asked.n, asked.model, asked.priority, asked.cache_salt, asked.top) == (3, "m", 4, "s", 4)
    options = asked.stream_options
    assert (asked.stream, options.include_usage, options.continuous_usage_stats, asked.return_token_ids) == (True, True, True, True)
    assert asked.chat_template_kwargs == {"think": False}
    assert not asked.fill_context


def test_output_lengths_by_default() -> None:
    assert parse_chat(chat()).fill_context
    assert parse_completion(completion()).max_tokens == DEFAULT_COMPLETION_TOKENS


def test_null_counts_as_left_out() -> None:
    nulls = {name: None for name in [*ChatBody.model_fields, *REFUSED] if name != "messages"}
    assert parse_chat(chat(**nulls)) == parse_chat(chat())


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]], ["a", [3]]])
def test_the_forms_of_a_prompt(prompt: Any) -> None:
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    assert parse_completion(completion(prompt=prompt)).prompts == ([prompt] if one else prompt)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, "a"], [1, True], [1, 2.0], [1, -1], [1 << 40], ["a", 3], {}, 5, [{}], ["a"] * 257]
)
def test_invalid_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(completion(prompt=prompt))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_unsupported_fields_are_refused_unless_they_change_nothing(field: str) -> None:
    parse, body = (parse_completion, completion) if field in ChatBody.model_fields else (parse_chat, chat)
    for harmless in (None, *HARMLESS.get(field, ())):
        parse(body(**{field: harmless}))
    with pytest.raises(UnsupportedField, match=field) as caught:
        parse(body(**{field: {"type": "json_schema"}}))
    assert caught.value.param == field


@pytest.mark.parametrize(("field", "value"), [("echo", 0), ("echo", [0.0]), ("best_of", True), ("routed_dp_rank", False)])
def test_numbers_and_booleans_of_unsupported_fields_are_distinguished(field: str, value: object) -> None:
    with pytest.raises(UnsupportedField, match=field):
        parse_chat(chat(**{field: value}))


def test_unknown_fields_are_found_at_every_level() -> None:
    body = chat(temprature=1, stream_options={"usage": True}, tools=[], metadata={"a": 1}, absent=None)
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}], "id": 5}] * 2
    parse_chat(body)
    assert set(BodySchema(ChatBody).unknown(body)) == {"temprature", "stream_options.usage", "messages.content.x", "messages.id"}
    native = {"text": "a", "sampling_params": [{"tempo": 1}]}
    assert list(BodySchema(GenerateBody).unknown(native)) == ["sampling_params.tempo"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", 7, None])
def test_non_text_parts_are_refused(kind: object) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, "image_url": {"url": "http://127.0.0.1:1/"}}]}
        ]
    }
    with pytest.raises(RequestError) as caught:
        parse_chat(body)
    assert caught.value.param == "messages[0].content[1].type"
    assert isinstance(caught.value, UnsupportedType) == isinstance(kind, str)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "messages": [{"role": "developer", "content": parts}, {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None}]
    }
    rendered = [message.rendered() for message in parse_chat(body).messages]
    assert rendered == [{"role": "system", "content": "a\nb"}, {"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "system"}]}, "messages[0].content"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"n": 129}, "n"),
        ({"n": 10_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"a": "x" * 2000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(17)}}, "chat_template_kwargs"),
    ],
)
def test_bounds_of_a_chat_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(chat(**fields))
    assert caught.value.param == named
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300, -1e300, True, "1", [], {}])
def test_numbers_must_be_finite_and_within_bounds(field: str, value: object) -> None:
    with pytest.raises(InvalidField, match=field):
        parse_chat(chat(**{field: value}))


def test_max_tokens_0_requires_echo() -> None:
    assert parse_completion(completion(max_tokens=0, echo=True)).only_echo
    with pytest.raises(RequestError, match="echo"):
        parse_completion(completion(max_tokens=0))


def test_best_of_is_at_least_n_and_excludes_streams() -> None:
    assert parse_completion(completion(n=2, best_of=5)).candidates == 5
    assert parse_completion(completion(n=2)).candidates == 2
    for fields in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(InvalidField, match="best_of"):
            parse_completion(completion(**fields))


def refusal_of(work: Callable[[], object]) -> RequestError | None:
    try:
        work()
    except RequestError as error:
        return error
    return None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


names = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *GenerateBody.model_fields, *REFUSED, "x"}))


@settings(max_examples=300)
@given(
    body=st.dictionaries(
        st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *GenerateBody.model_fields, *REFUSED, "x"})),
        values,
        max_size=5,
    )
)
def test_any_body_is_accepted_or_refused_by_a_request_error(body: dict[str, object]) -> None:
    for parse, base in ((parse_chat, chat()), (parse_completion, completion()), (parse_generate, {"text": "x"})):
        for candidate in (body, {**base, **body}):
            refusal = refusal_of(lambda: parse(candidate))  # noqa: B023
            assert refusal is None or (refusal.param and len(str(refusal)) < 600)


@settings(max_examples=100)
@given(value=values)
def test_depth_follows_the_definition(value: object) -> None:
    def depth(one: object) -> int:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    for limit in range(6):
        assert deeper_than(value, limit) == (depth(value) > limit)


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": 1e400}',
        b'{"a": "\\ud800"}',
        b'"\xc3\x28"',
        b"[" * 65 + b"]" * 65,
        b"[" * 5000 + b"]" * 5000,
        b"{'a': 1}",
    ],
)
def test_bodies_must_be_shallow_utf8_json(raw: bytes) -> None:
    with pytest.raises(RequestError):
        parse_json(raw)


def test_64_levels_pass() -> None:
    assert deeper_than(parse_json(b"[" * 64 + b"]" * 64), 63)


def test_defaults_are_those_of_the_engine() -> None:
    fields = parse_generate({"text": "a"}).samplings[0]
    assert fields.params() == SamplingParams()


PROMPT = "prompt must be a string, an array of token ids, or an array of 1 to 256 of these, none of them empty"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (chat(temperature=101), "temperature must be a number between 0 and 100; got 101."),
        (chat(temperature="hot"), 'temperature must be a number between 0 and 100; got "hot".'),
        (chat(top_p=0), "top_p must be a number above 0 and at most 1; got 0."),
        (chat(n=True), "n must be an integer between 1 and 128; got true."),
        (chat(stream="yes"), 'stream must be true or false; got "yes".'),
        (chat(stop=["a", ""]), 'stop[1] must be a string of 1 to 256 characters; got "".'),
        (chat(stop=5), "stop must be a string of 1 to 256 characters or an array of at most 16 items; got 5."),
        (chat(top_logprobs=3), "top_logprobs requires logprobs: true."),
        (chat(min_tokens=3, max_tokens=2, messages=5), "messages must be an array of 1 to 4096 items; got 5."),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            'messages[0].role must be one of "system", "developer", "user", "assistant", "tool", "function"; got "robot".',
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required."),
        ({}, "messages is required."),
        (5, "The body must be a JSON object."),
        (chat(tools=[1]), "tools[0] must be an object; got 1."),
        (completion(tools=[1]), "tools is not supported: only chat completions take tools. Leave it out."),
        (
            chat(logit_bias={"a": 1}),
            'logit_bias must be an object of at most 1024 entries, from a token id to a number between -100 and 100; got "a".',
        ),
        (
            chat(logit_bias={str(token): 1 for token in range(1025)}),
            "logit_bias must be an object of at most 1024 entries, from a token id to a number between -100 and 100; "
            "got an object of 1025 entries.",
        ),
        (completion(prompt=[-1]), f"{PROMPT}; got -1 at prompt[0]."),
        (completion(prompt=[5, 6, -1]), f"{PROMPT}; got -1 at prompt[2]."),
        (completion(prompt=["a", 5]), f"{PROMPT}; got 5 at prompt[1]."),
        (completion(prompt=["a", []]), f"{PROMPT}; got an array of 0 items at prompt[1]."),
        (completion(prompt=["a"] * 5000), f"{PROMPT}; got an array of 5000 items."),
        (completion(prompt=5), f"{PROMPT}; got 5."),
        (
            chat(seed=1e21),
            "seed must be an integer between -9223372036854775808 and 9223372036854775807; got an integer of more than 64 bits.",
        ),
        (
            chat(tools=[{"type": "function", "function": {"name": "a b"}}]),
            'tools[0].function.name must be 1 to 128 letters, digits, or any of "_-.:/"; got "a b".',
        ),
        (chat(user="u", cache_salt="x" * 1000), "cache_salt must be a string of at most 256 characters; got a string of 1000 characters."),
    ],
)
def test_refusals_are_plain_sentences(body: object, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        (parse_completion if isinstance(body, dict) and "prompt" in body else parse_chat)(body)
    assert str(caught.value) == sentence


def test_a_large_wrong_body_is_refused_by_its_first_fault() -> None:
    for field, value in (
        ("prompt", [None] * 100_000),
        ("prompt", [[-1] * 100_000]),
        ("logit_bias", {f"a{i}": 0 for i in range(100_000)}),
        ("stop_token_ids", [-1] * 100_000),
    ):
        with pytest.raises(ValidationError) as caught:
            CompletionBody.model_validate(completion(**{field: value}))
        assert caught.value.error_count() < 6


def test_native_answers_follow_the_form_of_the_prompts() -> None:
    assert parse_generate({"text": "a"}).single
    assert not parse_generate({"text": ["a"]}).single
    assert not parse_generate({"text": "a", "sampling_params": {"n": 2}}).single
    many = parse_generate(
        {"input_ids": [[1], [2, 3]], "rid": "r", "sampling_params": [{"temperature": 0}, {"max_new_tokens": 3, "sampling_seed": 4}]}
    )
    assert many.prompts == [[1], [2, 3]]
    assert [one.params().seed for one in many.samplings] == [None, 4]
    assert many.samplings[1].params().max_new_tokens == 3


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "image_data": "http://127.0.0.1/"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_routed_experts": True}, "return_routed_experts"),
    ],
)
def test_bounds_of_a_native_request_are_named(body: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_generate(body)
    assert caught.value.param == named


def test_harmless_values_of_refused_fields_are_accepted() -> None:
    parse_generate({"text": "a", "lora_path": None, "image_data": "", "return_hidden_states": False, "return_routed_experts": False})


@pytest.mark.parametrize("parse", [lambda **f: parse_chat(chat(**f)), lambda **f: parse_completion(completion(**f))])
def test_a_request_may_cap_its_drafts(parse: Callable[..., ChatBody | CompletionBody]) -> None:
    assert parse(speculative_num_steps=2).sampling(8, 0).speculative_num_steps == 2
    assert parse(speculative_num_steps=0).sampling(8, 0).draft_limit == 0
    assert parse(speculative_num_steps=None).sampling(8, 0).draft_limit == parse().sampling(8, 0).draft_limit == MAX_DRAFT_STEPS
    for wrong in (-1, 64, "two", 1.5, True):
        with pytest.raises(RequestError) as refused:
            parse(speculative_num_steps=wrong)
        assert refused.value.param == "speculative_num_steps"


def test_generate_caps_drafts_in_its_sampling_params() -> None:
    body = parse_generate({"text": "hi", "sampling_params": {"speculative_num_steps": 1}})
    assert isinstance(body.sampling_params, NativeSampling)
    assert body.sampling_params.speculative_num_steps == 1
    with pytest.raises(RequestError) as refused:
        parse_generate({"text": "hi", "sampling_params": {"speculative_num_steps": -1}})
    assert refused.value.param == "sampling_params.speculative_num_steps"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_answers_and_results_of_tools_may_be_empty(content: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called, answered = {"role": "assistant", "tool_calls": [call], **content}, {"role": "assistant", **content}
    result = {"role": "tool", "tool_call_id": "c", **content}
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}, called, result, answered]})
    assert [message.rendered()["content"] for message in body.messages] == ["hi", "", "", ""]
    for role in ("user", "system"):
        with pytest.raises(ValidationError):
            ChatBody.model_validate({"messages": [{"role": role, **content}]})


def test_template_variables_take_any_json_value_and_null_is_absent() -> None:
    given = {"tags": ["a", {"b": None}], "names": {"c": [1, 2.5]}, "enable_thinking": None, "low": -1}
    body = parse_chat(chat(chat_template_kwargs=given))
    assert body.template_kwargs() == {"tags": ["a", {"b": None}], "names": {"c": [1, 2.5]}, "low": -1}
    assert parse_chat(chat(chat_template_kwargs={"thinking": None}, reasoning_effort="none")).template_kwargs()["thinking"] is False
