"""Chats: rendered as transformers renders them, and no message can leave its place."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import CHATML, SPECIAL, reference, write_small_tokenizer

from runtime.errors import ConfigError, RequestError
from runtime.text import template_sandbox
from runtime.text.tokenizer import Tokenizer

LLAMA3 = (
    "{%- set loop_messages = messages %}{%- for message in loop_messages %}"
    "{%- set content = '<|im_start|>' + message['role'] + '<|im_end|>\n\n' + message['content'] | trim + '<|endoftext|>' %}"
    "{%- if loop.index0 == 0 %}{%- set content = bos_token + content %}{%- endif %}{{- content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\n\n' }}{%- endif %}"
)
THINKING = (
    "{% for m in messages %}\n    {% set content = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}\n"
    "    {% generation %}<|im_start|>{{ m.role }}\n{{ content }}{{ eos_token }}{% endgeneration %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  spaced \n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>hm</think>b"}, {"role": "user", "content": "c < d > e"}],
    [{"role": "user", "content": "ends with <"}, {"role": "assistant", "content": "> begins"}, {"role": "user", "content": ""}],
]


def _tokenizer(folder: Path, template: str | None = CHATML) -> Tokenizer:
    return Tokenizer.load(write_small_tokenizer(folder, template))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.mark.parametrize("template", [CHATML, LLAMA3, THINKING, PARTS], ids=["chatml", "llama3", "thinking", "parts"])
def test_ids_equal_those_of_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = _tokenizer(tmp_path, template)
    hf = reference(tmp_path)
    for chat in CHATS:
        for prompt in (True, False):
            expected = hf.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert tokenizer.encode_chat(chat, add_generation_prompt=prompt) == expected
            assert tokenizer.render_chat(chat, add_generation_prompt=prompt) == hf.apply_chat_template(
                chat, add_generation_prompt=prompt, tokenize=False
            )


@pytest.mark.parametrize("template", [CHATML, LLAMA3, PARTS], ids=["chatml", "llama3", "parts"])
@pytest.mark.parametrize("last", ["The answer is", "trailing space ", "<", "with <think>"])
def test_continuing_the_last_message_equals_transformers(tmp_path: Path, template: str, last: str) -> None:
    tokenizer = _tokenizer(tmp_path, template)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}]
    expected = reference(tmp_path).apply_chat_template(chat, continue_final_message=True, return_dict=False)
    assert tokenizer.encode_chat(chat, add_generation_prompt=False, continue_final_message=True) == expected


THOUGHTLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('<think>')[0] if m.role == 'assistant' else m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nOPENING{% endif %}"
)


@pytest.mark.parametrize("opening", ["", "<think>\n"])
@pytest.mark.parametrize("parts", [False, True])
def test_continuing_a_thought_that_the_template_removes(tmp_path: Path, opening: str, parts: bool) -> None:
    thought = "<think>\nLet me <|im_end|>"
    content = [{"type": "text", "text": thought}] if parts else thought
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    template = THOUGHTLESS.replace("m.content.split", "m.content[0].text.split" if parts else "m.content.split").replace("OPENING", opening)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    tokenizer = _tokenizer(tmp_path, template)
    ids = tokenizer.encode_chat(chat, **options)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|im_start|>user\nq<|im_end|><|im_start|>assistant\n{thought}"
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1], "the message makes no control token"


@pytest.mark.parametrize("parts", [False, True])
def test_continuing_a_thought_with_a_template_without_generation_prompt(tmp_path: Path, parts: bool) -> None:
    text = "(m.content if m.content is string else m.content[0].text)" if parts else "m.content"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ TEXT.split('</think>')[-1] }}<|im_end|>{% endfor %}".replace(
        "TEXT", text
    )
    thought = "<think>\nShort.</think>Yes"
    content = [{"type": "text", "text": thought}] if parts else thought
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    tokenizer = _tokenizer(tmp_path, template)
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|im_start|>user\nq<|im_end|><|im_start|>assistant\n{thought}"


def test_kwargs_reach_the_template(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, THINKING)
    chat = CHATS[0]
    assert tokenizer.render_chat(chat, template_kwargs={"enable_thinking": False}).endswith("<think></think>")
    assert not tokenizer.render_chat(chat, template_kwargs={"enable_thinking": True}).endswith("</think>")


def test_control_tokens_inside_template_variables_stay_text(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, "{% for n in names %}{{ n.a }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}")
    ids = tokenizer.encode_chat(CHATS[0], template_kwargs={"names": [{"a": SPECIAL[0]}]})
    assert not tokenizer.special_ids.intersection(ids)


@pytest.mark.parametrize(
    "name", ["messages", "bos_token", "add_generation_prompt", "_private", "not an identifier", "raise_exception", "range"]
)
def test_reserved_template_kwargs_are_refused(chatml: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs must not contain"):
        chatml.encode_chat(CHATS[0], template_kwargs={name: 1})


@pytest.mark.parametrize("value", [object(), float("nan"), {1: {2, 3}}, "x" * 20000])
def test_template_kwargs_must_be_plain_json(chatml: Tokenizer, value: object) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        chatml.encode_chat(CHATS[0], template_kwargs={"extra": value})


# ---- no message can leave its place

TRIMMED_PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endfor %}"
FRAGMENTS = ["<", "|", ">", "|>", "<|", "<|im_", "im_end|>", *SPECIAL, "<think>", "</think>", " ", "\n", "x", "\ufdd0"]
spelled = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@settings(max_examples=150)
@given(st.lists(spelled, min_size=1, max_size=3))
def test_messages_never_make_control_tokens(chatml: Tokenizer, texts: list[str]) -> None:
    chat = [{"role": "user", "content": text} for text in texts]
    harmless = [{"role": "user", "content": "x"} for _ in texts]
    made = [i for i in chatml.encode_chat(chat) if i in chatml.special_ids]
    assert made == [i for i in chatml.encode_chat(harmless) if i in chatml.special_ids]
    assert chatml.decode(chatml.encode_chat(chat), skip_special_tokens=False) == chatml.render_chat(chat)


@settings(max_examples=100)
@given(
    spelled,
    spelled,
    st.sampled_from([LLAMA3, PARTS, "{% for m in messages %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endfor %}"]),
)
def test_adjacent_texts_never_join_to_a_control_token(
    tmp_path_factory: pytest.TempPathFactory, first: str, second: str, template: str
) -> None:
    tokenizer = _cached_tokenizer(tmp_path_factory, template)
    parts = template is not LLAMA3
    content: Any = [{"type": "text", "text": first}, {"type": "text", "text": second}] if parts else first
    harmless: Any = [{"type": "text", "text": "x"}] if parts else "x"
    made, expected = (
        [i for i in tokenizer.encode_chat([{"role": "user", "content": c}]) if i in tokenizer.special_ids] for c in (content, harmless)
    )
    assert made == expected


_CACHE: dict[str, Tokenizer] = {}


def _cached_tokenizer(factory: pytest.TempPathFactory, template: str) -> Tokenizer:
    if template not in _CACHE:
        _CACHE[template] = _tokenizer(factory.mktemp("joined"), template)
    return _CACHE[template]


def test_text_around_a_spelled_control_token_is_encoded_whole(chatml: Tokenizer) -> None:
    """The guard's marks leave no seam: the message's ids are those of its text without control tokens."""
    text = "hello <|im_end|> world"
    ids = chatml.encode_chat([{"role": "user", "content": text}], add_generation_prompt=False, chat_template="{{ messages[0].content }}")
    assert ids == chatml.encode_plain(text)


def test_roles_must_be_words(chatml: Tokenizer) -> None:
    for role in ("<|im_end|>", "", "user\n", None, 3):
        with pytest.raises(RequestError, match="The role of a message must be a word"):
            chatml.encode_chat([{"role": role, "content": "x"}])


# ---- templates that misbehave


def _render(chatml: Tokenizer, template: str) -> str:
    return chatml.render_chat(CHATS[0], chat_template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ undefined_thing.attribute }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ 'a' * 100000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(90000) %}{{ messages[0]['content'] * 100000 }}{% endfor %}",
        "{% include 'x' %}",
        "{{ unclosed",
    ],
)
def test_bad_template_is_a_400_without_internals(chatml: Tokenizer, template: str) -> None:
    with pytest.raises(RequestError) as caught:
        _render(chatml, template)
    message = str(caught.value)
    assert "0x" not in message
    assert "\n" not in message
    assert caught.value.status == 400


DOUBLING = "{% set s = namespace(t='x' * 65536) %}{% for i in range(40) %}{% set s.t = s.t ~ s.t %}{% endfor %}{{ s.t | length }}"


@pytest.mark.parametrize("template", [DOUBLING, "{{ 'x' | center(10 ** 10) }}", "{{ '%0999999999d' % 1 }}"])
def test_a_template_of_a_request_has_little_memory(chatml: Tokenizer, template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match="needs more than 512 MiB") as caught:
        _render(chatml, template)
    assert caught.value.param == "chat_template"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_template_of_a_request_renders_as_the_models_own(chatml: Tokenizer) -> None:
    options: dict[str, Any] = {"template_kwargs": {"enable_thinking": False}, "tools": [{"type": "function", "function": {"name": "f"}}]}
    for chat in CHATS:
        assert chatml.encode_chat(chat, chat_template=CHATML, **options) == chatml.encode_chat(chat, **options)


def test_loops_without_output_hit_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    nested = "{% set r = range(90000) | list %}{% for a in r %}{% for b in r %}{% set check_time = 1 %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="takes more than"):
        _tokenizer(tmp_path, nested).render_chat(CHATS[0])


def test_loop_variables_work_under_the_time_limit(chatml: Tokenizer) -> None:
    body = "{{ loop.index }}{% if i == 1 %}{% continue %}{% endif %}{{ ',' if not loop.last }}"
    template = f"{{% for i in range(3) %}}{body}{{% else %}}none{{% endfor %}}"
    assert _render(chatml, template) == "1,23"


def test_missing_and_broken_templates_say_what_to_do(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, None)
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match="--chat-template"):
        tokenizer.encode_chat(CHATS[0])
    with pytest.raises(ConfigError, match="not valid Jinja"):
        Tokenizer.load(tmp_path, chat_template="{% for %}")
    with pytest.raises(ConfigError, match="neither a file"):
        Tokenizer.load(tmp_path, chat_template="missing.jinja")


def test_a_given_template_replaces_the_models(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    assert Tokenizer.load(tmp_path, chat_template=str(file)).render_chat(CHATS[0]) == "mine: hi"


def test_tojson_and_strftime_follow_hugging_face(chatml: Tokenizer) -> None:
    assert _render(chatml, "{{ {'b': 'é<', 'a': [1]} | tojson }}") == '{"b": "é<", "a": [1]}'
    assert len(_render(chatml, "{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_deeply_nested_content_is_refused(chatml: Tokenizer) -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        chatml.encode_chat([{"role": "user", "content": deep}])


# ---- tools

TOOL = {"type": "function", "function": {"name": "f", "description": "Says <|im_end|>", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|im_end|>é"}'}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "<|im_end|>1", "tool_call_id": "call_1"},
    {"role": "tool", "content": "2", "tool_call_id": "call_1"},
]
WITH_TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} ARGUMENTS</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
)
OBJECTS = WITH_TOOLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
TEXTS = WITH_TOOLS.replace("ARGUMENTS", "{{ c.function.arguments + '' }}")


@pytest.mark.parametrize("template", [OBJECTS, TEXTS], ids=["objects", "texts"])
def test_templates_get_arguments_in_the_form_they_take(tmp_path: Path, template: str) -> None:
    tokenizer = _tokenizer(tmp_path, template)
    text = tokenizer.render_chat(CALLED, tools=[TOOL])
    assert '<tool_call>f {"a": "<|im_end|>é"}</tool_call>' in text
    assert text.startswith('{"type": "function", "function": {"name": "f"')
    ids = tokenizer.encode_chat(CALLED, tools=[TOOL])
    assert [tokenizer.token_text(i) for i in ids if i in tokenizer.special_ids] == ["<|im_start|>", "<|im_end|>"] * 4


@pytest.mark.parametrize("place", ["files", "tokenizer_config"])
def test_chats_with_tools_use_the_template_for_tools(tmp_path: Path, place: str) -> None:
    write_small_tokenizer(tmp_path, CHATML if place == "files" else None)
    for_tools = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}" + OBJECTS  # as published ones, it fails without tools
    if place == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    else:
        path = tmp_path / "tokenizer_config.json"
        named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": for_tools}]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    tokenizer, hf = Tokenizer.load(tmp_path), reference(tmp_path)
    arguments = {"a": "<|im_end|>é"}
    call = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}]}
    system = {"role": "system", "content": "Be brief."}
    for tools in (None, [TOOL]):
        expected = hf.apply_chat_template([system, CALLED[0]], tools=tools, add_generation_prompt=True, tokenize=False)
        assert tokenizer.render_chat([system, CALLED[0]], tools=tools or ()) == expected
    expected = hf.apply_chat_template([system, CALLED[0], call, *CALLED[2:]], tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert tokenizer.render_chat([system, *CALLED], tools=[TOOL]) == expected
    assert tokenizer.describes_tools
    assert tokenizer.tool_template == for_tools


def test_arguments_with_half_of_a_surrogate_pair_are_rendered(tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud83d\ud83d\ude00"}'}}
    messages = [CALLED[0], {"role": "assistant", "content": "", "tool_calls": [call]}, CALLED[3]]
    tokenizer = _tokenizer(tmp_path, OBJECTS)
    assert '<tool_call>f {"a": "\ufffd\U0001f600"}</tool_call>' in tokenizer.render_chat(messages, tools=[TOOL])
    assert tokenizer.encode_chat(messages, tools=[TOOL])


def test_a_template_that_knows_no_tools_is_told_about_them_in_text(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    text = tokenizer.render_chat(CALLED, tools=[TOOL])
    system, user, call, results = text.split("<|im_start|>")[1:5]
    assert system.startswith("system\nYou may call functions")
    assert '{"type": "function", "function": {"name": "f"' in system
    assert user == "user\nq<|im_end|>\n"
    assert call == 'assistant\n<tool_call>\n{"name": "f", "arguments": {"a": "<|im_end|>é"}}\n</tool_call><|im_end|>\n'
    assert results.startswith("user\n<tool_response>\n<|im_end|>1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n")
    ids = tokenizer.encode_chat(CALLED, tools=[TOOL], add_generation_prompt=False)
    assert [tokenizer.token_text(i) for i in ids if i in tokenizer.special_ids] == ["<|im_start|>", "<|im_end|>"] * 4
    with_system = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, *CALLED], tools=[TOOL])
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")


def test_a_template_without_system_messages_is_told_in_the_first_message(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    text = _tokenizer(tmp_path, refusing).render_chat(CALLED, tools=[TOOL])
    assert "<|im_start|>user\nYou may call functions" in text


def test_calls_are_rendered_without_tools_too(tmp_path: Path) -> None:
    assert '<tool_call>\n{"name": "f"' in _tokenizer(tmp_path).render_chat(CALLED)


ROLES = "{% for m in messages %}SKIP<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\nEND{% endfor %}"
DROPS = ROLES.replace("SKIP", "{% if m.role != 'system' or loop.first %}").replace("END", "{% endif %}")
REFUSES = ROLES.replace("SKIP", "{% if not loop.first and m.role == 'system' %}{{ raise_exception('x') }}{% endif %}").replace("END", "")
ALTERNATES = REFUSES.replace("m.role == 'system'", "m.role in ('system', loop.previtem.role)")
NO_SYSTEM = ALTERNATES.replace("not loop.first and m.role in ('system', ", "m.role == 'system' or not loop.first and m.role in (")
LAST_SYSTEM = (
    "{% set last = namespace(text='') %}{% for m in messages if m.role == 'system' %}{% set last.text = m.content %}{% endfor %}"
    "<|im_start|>system\n{{ last.text }}<|im_end|>\n"
) + ROLES.replace("SKIP", "{% if m.role != 'system' %}").replace("END", "{% endif %}")
MANY_ROLES = [("system", "s1"), ("system", "s2"), ("user", "u1"), ("user", "u2"), ("assistant", "a"), ("system", "s3"), ("user", "u3")]
ONE_SYSTEM = [("system", "s1\n\ns2"), ("user", "u1"), ("user", "u2"), ("assistant", "a"), ("user", "s3"), ("user", "u3")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, MANY_ROLES),
        (DROPS, ONE_SYSTEM),
        (REFUSES, ONE_SYSTEM),
        (LAST_SYSTEM, ONE_SYSTEM),
        (ALTERNATES, [("system", "s1\n\ns2"), ("user", "u1\n\nu2"), ("assistant", "a"), ("user", "s3\n\nu3")]),
        (NO_SYSTEM, [("user", "s1\n\ns2\n\nu1\n\nu2"), ("assistant", "a"), ("user", "s3\n\nu3")]),
    ],
    ids=["any", "drops", "refuses", "last system", "alternates", "no system"],
)
def test_messages_in_an_order_that_the_template_lacks_are_fitted(tmp_path: Path, template: str, expected: list[tuple[str, str]]) -> None:
    chat = [{"role": role, "content": content} for role, content in MANY_ROLES]
    text = _tokenizer(tmp_path, template).render_chat(chat, add_generation_prompt=False)
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in expected)


MISTRAL = (
    "{% set turns = namespace(count=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (turns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{% set turns.count = turns.count + 1 %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "<call {{ c.id }} {{ c.function.arguments | tojson }}>{% endfor %}<{{ m.role }} {{ m.tool_call_id }} {{ m.content }}>{% endfor %}"
)


@pytest.mark.parametrize("name", ["call_0123456789abcdef", "abcDEF123"])
def test_a_conversation_with_calls_is_fitted_to_a_template_that_is_strict_about_them(tmp_path: Path, name: str) -> None:
    """The user speaks after the result of a tool, and ids are those of another server."""
    call = {**CALL, "id": name}
    chat = [CALLED[0], {**CALLED[1], "tool_calls": [call]}, {**CALLED[3], "tool_call_id": name}]
    asked = [*chat, {"role": "user", "content": "more"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = _tokenizer(tmp_path, MISTRAL).render_chat(asked, add_generation_prompt=False)
    found = re.fullmatch(
        r"<user  q><call (\w{9}) (.*)><assistant  ><tool (\w{9}) 2><assistant   ><user  more><assistant  a\n\nb>", text, re.DOTALL
    )
    assert found is not None, text
    assert found[1] == found[3]
    assert (found[1] == name) == (len(name) == 9)


def test_the_assistant_may_greet_although_the_template_wants_the_user_first(tmp_path: Path) -> None:
    chat = [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "q"}]
    assert _tokenizer(tmp_path, MISTRAL).render_chat(chat, add_generation_prompt=False) == "<user   ><assistant  Hello!><user  q>"
    after_system = _tokenizer(tmp_path, REFUSES).render_chat([{"role": "system", "content": "s"}, *chat], add_generation_prompt=False)
    assert after_system == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (("system", "s"), ("assistant", "Hello!"), ("user", "q"))
    )


QWEN_THINKING = (
    "{% for m in messages %}{% set content = m.content %}{% set thought = '' %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% set content = '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1_THINKING = THINKING.replace("<think></think>", "<think>\n").replace("enable_thinking is defined and not enable_thinking", "true")


@pytest.mark.parametrize("last", ["<think>\nLet me", "<think>\na\n</think>\n\nThe", " <think>Let </think> me ", "a\n</think>\n\nThe"])
def test_thoughts_of_a_continued_message_are_kept(tmp_path: Path, last: str) -> None:
    for template in (QWEN_THINKING, R1_THINKING):
        text = _tokenizer(tmp_path, template).render_chat(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        begun = last if last.lstrip().startswith("<think>") else f"<think>\n{last}"
        assert text.endswith(f"<|im_start|>assistant\n{begun}")


def test_a_continued_thought_replaces_the_empty_one_of_the_prompt(tmp_path: Path) -> None:
    template = QWEN_THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nLet me</think>b"}]
    text = _tokenizer(tmp_path, template).render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n<think>\nLet me</think>b")


def test_a_continued_thought_may_have_other_tags(tmp_path: Path) -> None:
    template, last = QWEN_THINKING.replace("think>", "seed:think>"), "<seed:think>Let me"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}]
    text = _tokenizer(tmp_path, template).render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(f"<|im_start|>assistant\n{last}")


@pytest.mark.parametrize("last", ["<answer>", "<div>\n", " <b>x"])
def test_a_tag_that_the_template_does_not_know_opens_no_thought(tmp_path: Path, last: str) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}]
    for template in (QWEN_THINKING, R1_THINKING):
        tokenizer = _tokenizer(tmp_path, template)
        expected = reference(tmp_path).apply_chat_template(chat, continue_final_message=True, tokenize=False)
        assert tokenizer.render_chat(chat, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.parametrize("written", ["m.arguments | tojson(ensure_ascii=True)", "m.arguments", "m.arguments | string"])
def test_escaped_text_has_no_marks(tmp_path: Path, written: str) -> None:
    tokenizer = _tokenizer(tmp_path, "{% for m in messages %}{{ m.content }} {{ WRITTEN }}{% endfor %}".replace("WRITTEN", written))
    hf = reference(tmp_path)
    for text in ("ends <", "<|im_end|>", "|im_start|> begins", "\\\\<|im_end|>", "\\ufdd0 <|im_end|>"):
        chat = [{"role": "user", "content": text, "arguments": {"a": [text]}}]
        assert tokenizer.render_chat(chat) == hf.apply_chat_template(chat, tokenize=False)
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode_chat(chat)), "a text makes no control token"


ANALYSIS = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('either a content or a thought') }}{% endif %}"
    "<analysis {{ m.content or m.thinking }}><call {{ m.tool_calls[0].function.arguments | tojson }}>"
    "{% else %}<{{ m.role }} {{ m.content }}>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("text", "shown"), [("", "Hm."), ("One moment.", "Hm.\n\nOne moment.")])
def test_a_call_keeps_its_thought_and_its_text(tmp_path: Path, text: str, shown: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text, "thinking": "Hm.", "tool_calls": [call]}]
    assert _tokenizer(tmp_path, ANALYSIS).render_chat(chat) == f'<user q><analysis {shown}><call {{"x": 1}}>'


ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    "<{{ m.content }} call {{ m.tool_calls[0].function.arguments | tojson }}>"
    "{% else %}<{{ m.role }} {{ m.content }}>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [ONE_CALL, ONE_CALL.replace("!= 1", "== 0")], ids=["refuses", "drops"])
def test_calls_of_one_message_are_split_for_templates_of_single_calls(tmp_path: Path, template: str) -> None:
    calls = [{"id": f"call{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {i}}}'}} for i in range(3)]
    results = [{"role": "tool", "tool_call_id": f"call{i}", "content": f"result {i}"} for i in (1, 0)]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Both.", "tool_calls": calls}, *results]
    text = _tokenizer(tmp_path, template).render_chat([*chat, {"role": "assistant", "content": "a"}])
    assert text == '<user q><Both. call {"x": 0}><tool result 0>< call {"x": 1}><tool result 1>< call {"x": 2}><assistant a>'
