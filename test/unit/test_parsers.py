"""Tool calls and thinking are read the same however the output is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from formats import BODY, FUZZ_EXAMPLES, TOOLS, Answer, read, text_parser, write
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.parsers.argument_schema import ANY, ArgumentSchema
from runtime.parsers.argument_types import typed_json
from runtime.parsers.deltas import CallStart
from runtime.parsers.registry import THINK_FORMATS, TOOL_FORMATS

FORMATS = sorted(TOOL_FORMATS)
TWO = [("get_weather", BODY), ("now", {})]


def answers(name: str | None, text: str, thinking: str | None = None, **options: Any) -> Answer:
    """The answer to `text`, the same at once, letter by letter, and cut in two at every place."""
    whole = read(text_parser(name, thinking, **options), [text])
    assert read(text_parser(name, thinking, **options), list(text)) == whole
    for cut in range(1, len(text)):
        assert read(text_parser(name, thinking, **options), [text[:cut], text[cut:]]) == whole, text[:cut]
    return whole


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_at_every_split(name: str) -> None:
    answer = answers(name, write(name, TWO))
    assert answer.parsed == TWO
    assert (answer.content, answer.reasoning) == ("", "")


@pytest.mark.parametrize("name", FORMATS)
def test_text_before_and_after_calls(name: str) -> None:
    answer = answers(name, f"Let me see. <1 [x]\n\n{write(name, [('now', {})])}\nThat is all.")
    assert answer.parsed == [("now", {})]
    assert answer.content == "Let me see. <1 [x]\nThat is all."


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_unchanged(name: str) -> None:
    for text in (
        "",
        "plain",
        " white \n",
        "a < b [1] {x} [TOOL] <tool <|x|> ```json {}\n",
        '{"name": "Bob"}',
        "[now]",
        "<tool_call> is a tag\n",
    ):
        assert answers(name, text) == Answer(text)


@pytest.mark.parametrize("name", FORMATS)
def test_an_unfinished_call_keeps_what_was_read(name: str) -> None:
    text = write(name, TWO)
    for cut in range(1, len(text)):
        answer = read(text_parser(name), [text[:cut]])
        assert read(text_parser(name), list(text[:cut])) == answer
        for (_, arguments), (_, expected) in zip(answer.calls, TWO, strict=False):
            written = json.dumps(expected, ensure_ascii=False)
            assert any(written.startswith(arguments[: len(arguments) - held]) for held in range(16)), "at most a tag that was cut in two"


def test_an_output_cut_inside_of_the_end_of_a_call_has_no_content() -> None:
    text = write("hermes", [("now", {})])
    for cut in range(text.index("}}") + 2, len(text)):
        assert read(text_parser("hermes"), [text[:cut]]) == Answer("", "", [("now", "{}")])
        assert read(text_parser("hermes"), list(text[:cut])) == Answer("", "", [("now", "{}")])


@pytest.mark.parametrize("name", [name for name in FORMATS if write(name, TWO).endswith(">")])
def test_a_broken_end_of_a_call_is_text_in_any_pieces(name: str) -> None:
    text = write(name, [("now", {})])
    broken = f"{text[:-1]} and\nmore"
    answer = read(text_parser(name), [broken])
    assert answer.content.endswith(" and\nmore")
    assert read(text_parser(name), list(broken)) == answer


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_an_unknown_function_stays_text(name: str) -> None:
    text = write(name, [("drop_tables", {"x": 1})])
    assert answers(name, text) == Answer(text)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_with_broken_arguments_loses_no_text(name: str) -> None:
    text = write(name, [("get_weather", {"days": 1, "city": "x"})])
    for cut in range(3, len(text) - 1):
        for junk in ("", "\x00", "}", "]", '"'):
            answer = read(text_parser(name), [text[:cut] + junk + text[cut + 1 :]])
            assert len(answer.calls) <= 1


@pytest.mark.parametrize("name", FORMATS)
def test_thinking_before_calls(name: str) -> None:
    answer = answers(name, f"<think>\nHmm <b>\n</think>\n\nOK\n{write(name, [('now', {})])}", "qwen3")
    assert (answer.reasoning, answer.content, answer.parsed) == ("Hmm <b>", "OK", [("now", {})])


JSON_CALLS = {
    "arguments first": '{"arguments": {"city": "x"}, "name": "get_weather"}',
    "a string of JSON": r'{"name": "get_weather", "arguments": "{\"city\": \"x\"}"}',
    "the last brace missing": '{"name": "get_weather", "arguments": {"city": "x"}',
    "other members first": '{"name": "get_weather", "z": [{}], "y": {"city": "y"}, "arguments": {"city": "x"}}',
    "more members": '{"id": 7, "type": "function", "name": "get_weather", "arguments": {"city": "x"}, "z": [{}]}',
}


@pytest.mark.parametrize("call", JSON_CALLS.values(), ids=JSON_CALLS.keys())
def test_variants_of_a_json_call(call: str) -> None:
    assert answers("hermes", f"<tool_call>{call}</tool_call>").parsed == [("get_weather", {"city": "x"})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", r"[get_weather(city='\ud83d')]"),
        ("hermes", r"""<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"\ud83d\"}"}</tool_call>"""),
        ("hermes", r"""<tool_call>{"name": "get_weather", "arguments": {"city": "\ud83d\ud83d\ude00\ude00\ud83d\n"}}</tool_call>"""),
        ("glm47", r"""<tool_call>get_weather<arg_key>free</arg_key><arg_value>["\ud83d"]</arg_value></tool_call>"""),
    ],
)
def test_half_of_a_surrogate_pair_becomes_a_replacement_character(name: str, text: str) -> None:
    ((_, arguments),) = answers(name, text).calls
    assert "\ufffd" in arguments
    assert json.loads(json.dumps(json.loads(arguments), ensure_ascii=False).encode()), "a client can send it back"


def test_line_breaks_inside_json_strings_are_escaped() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>'
    assert answers("hermes", text).parsed == [("get_weather", {"city": "a\nb\tc"})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": "no object"}</tool_call>',
        r'<tool_call>{"name": "get_weather", "arguments": "{\"rate\": NaN}"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "args": {"city": "x"}}</tool_call>',
        '<tool_call>{"name": "get_weather", "city": "x"}</tool_call>',
        "<tool_call>{'name': 'get_weather'}</tool_call>",
        '<tool_call>{"name": "get_wea',
        '<tool_call>{"arguments": ' + '{"a":' * 100 + "1" + "}" * 101 + "</tool_call>",
    ],
)
def test_a_malformed_call_comes_back_as_text(text: str) -> None:
    assert answers("hermes", f"See: {text}") == Answer(f"See: {text}")


@pytest.mark.parametrize("name", [name for name in FORMATS if not TOOL_FORMATS[name].plain_begins])
def test_a_call_after_text_like_a_call_is_read(name: str) -> None:
    begin = TOOL_FORMATS[name].begins[0]
    assert answers(name, f"{begin} is a tag. {begin}{write(name, TWO)}").parsed == TWO


@pytest.mark.parametrize(
    ("name", "begin"),
    [("deepseekv3", "<｜tool▁call▁begin｜>"), ("deepseekv31", "<｜tool▁call▁begin｜>"), ("kimi_k2", "<|tool_call_begin|>")],
)
def test_text_after_the_beginning_of_no_call_is_kept(name: str, begin: str) -> None:
    text = write(name, TWO)
    end = text.rindex("<")
    answer = answers(name, f"{text[:end]}{begin}{text[end:]} Done.")
    assert (answer.parsed, answer.content) == (TWO, f"{begin}{text[end:]} Done.")


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("deepseekv3", "<｜tool▁sep｜>"),
        ("deepseekv3", "```json"),
        ("deepseekv31", "<｜tool▁sep｜>"),
        ("kimi_k2", "<|tool_call_argument_begin|>"),
    ],
)
def test_a_call_without_the_tag_after_its_name_is_text(name: str, tag: str, at: int) -> None:
    calls = [("now", {}), ("ns.run-2", {"command": "x"}), ("get_weather", {"days": 1})]
    parts = write(name, calls).split(tag)
    answer = answers(name, f"{tag.join(parts[: at + 1])}<broken>{tag.join(parts[at + 1 :])} Done.")
    later = calls[at + 1 :] if name == "kimi_k2" else []  # its calls need no tag around them
    assert answer.parsed == calls[:at] + later
    shown = [call for call in calls[at:] if call not in later]
    assert all(part in answer.content for call, arguments in shown for part in (call, json.dumps(arguments), "<broken>", " Done."))


@pytest.mark.parametrize(("name", "tag"), [("deepseekv31", "<｜tool▁sep｜>"), ("kimi_k2", "<|tool_call_argument_begin|>")])
def test_a_tag_between_the_name_and_the_arguments_may_be_absent(name: str, tag: str) -> None:
    assert answers(name, write(name, TWO).replace(tag, "")).parsed == TWO


def test_arguments_that_break_off_end_the_call_and_the_rest_is_text() -> None:
    answer = answers("hermes", '<tool_call>{"name": "get_weather", "arguments": {"days": 1, oops}}</tool_call> ok')
    assert answer.calls == [("get_weather", '{"days": 1, ')]
    assert answer.content == "oops}}</tool_call> ok"


def test_arguments_arrive_as_they_are_written() -> None:
    parser = text_parser("hermes")
    parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "a', [])
    for letter in "bcd":
        assert [delta.text for delta in parser.feed(letter, [])] == [letter]  # type: ignore[union-attr]


def test_mistral_writes_calls_in_three_ways() -> None:
    for text in ('[TOOL_CALLS]get_weather[ARGS]{"city": "x"}', '[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{"city": "x"}',
                 '[TOOL_CALLS] {"name": "get_weather", "arguments": {"city": "x"}}'):  # fmt: skip
        assert answers("mistral", f"{text}{text}").parsed == [("get_weather", {"city": "x"})] * 2


@pytest.mark.parametrize("text", [
    "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>",
    "<|tool_call_begin|> functions.now:0 <|tool_call_argument_begin|> \n<|tool_call_end|><|tool_calls_section_end|>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|><|tool_calls_section_end|>",
])  # fmt: skip
def test_kimi_may_leave_out_the_outer_tags_and_empty_arguments(text: str) -> None:
    answer = answers("kimi_k2", f"I look.\n{text}\nDone.")
    assert (answer.calls, answer.content) == ([("now", "{}")], "I look.\nDone.")
    called = answers("kimi_k2", f"<think>Hm.{text}", "kimi_k2")
    assert (called.calls, called.reasoning, called.content) == ([("now", "{}")], "Hm.", "")


KIMI_CALL = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("written", "name"),
    [("functions.now:12", "now"), (" now:0 ", "now"), ("functions.now", "now"), ("functions.ns.run-2:1", "ns.run-2"),
     ("functions.a:0", "a"), ("functions.a:b:0", "a:b"), ("functions.a:b", "a"), ("functions.c:d:3", "c:d")],
)  # fmt: skip
def test_kimi_names_the_function_in_the_id_of_the_call(written: str, name: str) -> None:
    text = KIMI_CALL.format(written)
    for pieces in ([text], list(text)):
        parser = text_parser("kimi_k2")
        parser._reader.tools = {**TOOLS, "a": {}, "a:b": {}, "c:d": {}}
        (start,) = [delta for piece in pieces for delta in parser.feed(piece, []) if isinstance(delta, CallStart)]
        assert (start.name, start.id) == (name, written.strip())


def test_a_repeated_id_of_a_call_is_replaced() -> None:
    first, second, third = [KIMI_CALL.format("functions.now:0")] * 2 + [KIMI_CALL.format("x" * 200 + "now:0")]
    parser = text_parser("kimi_k2")
    ids = [delta.id for delta in parser.feed(first + second + third, []) if isinstance(delta, CallStart)]
    assert ids == ["functions.now:0", "call_0"]


@pytest.mark.parametrize(
    "text", ["<|tool_call|>CALL<|/tool_call|>", "<|tool_call|> [CALL, CALL]", "functools[CALL]", "<|tool_call|>functools[CALL]"]
)
def test_phi_writes_calls_in_several_ways(text: str) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "x"}}'
    answer = answers("phi4_mini_json", f"I look.\n{text.replace('CALL', call)}\nDone.")
    assert answer.parsed == [("get_weather", {"city": "x"})] * text.count("CALL")
    assert answer.content == "I look.\nDone."


def test_qwen3_coder_may_leave_out_the_outer_tag() -> None:
    text = write("qwen3_coder", TWO).replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    assert answers("qwen3_coder", text).parsed == TWO


def test_glm_arguments_may_be_absent_and_on_one_line() -> None:
    text = "<tool_call>now</tool_call><tool_call>get_weather<arg_key>days</arg_key><arg_value>7</arg_value></tool_call>"
    assert answers("glm47", text).parsed == [("now", {}), ("get_weather", {"days": 7})]


def test_values_keep_their_line_breaks() -> None:
    for name in ("qwen3_coder", "mimo", "seed_oss", "minimax-m2", "glm47", "gemma4"):
        calls = [("ns.run-2", {"command": "\n  cd x &&\n\tls\n\n"})]
        assert answers(name, write(name, calls)).parsed == calls


VALUES = [
    ("city", "12", "12"), ("days", " 12 ", 12), ("days", "-007", -7), ("days", "many", "many"), ("exact", "True", True),
    ("rate", "2", 2), ("rate", "1e3", 1000.0), ("rate", "NaN", "NaN"), ("tags", "['a', 1]", ["a", 1]), ("tags", "[" * 9999, "[" * 9999),
    ("filter", '{"a": 1}', {"a": 1}), ("note", "null", None), ("note", "12", "12"), ("unit", "C", "C"), ("free", "12", "12"),
    ("free", '[1, "x"]', [1, "x"]), ("absent", "{}", {}), ("days", "9" * 5000, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), VALUES, ids=[f"{name}-{text[:9]}" for name, text, _ in VALUES])
def test_values_have_the_types_of_the_schema(name: str, text: str, value: Any) -> None:
    written = typed_json(text, ArgumentSchema(TOOLS["get_weather"]).parameter_types(name))
    if len(text) == 5000:
        assert written == text
    else:
        assert json.loads(written) == value
        assert type(json.loads(written)) is type(value)


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": {"a": 5}}, {"properties": {"a": {"$ref": "#/properties/a"}}}])
def test_odd_schemas_leave_a_parameter_untyped(schema: dict[str, Any]) -> None:
    assert typed_json("5", ArgumentSchema(schema).parameter_types("a")) == '"5"'


def test_unions_that_refer_to_each_other_have_types() -> None:
    both = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}] * 8
    unions = {"A": {"anyOf": [*both, {"type": "string"}]}, "B": {"oneOf": [*both, {"type": "null"}]}}
    schema = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": unions}
    assert ArgumentSchema(schema).parameter_types("x") == {"string", "null"}


def test_references_may_escape_the_names_of_definitions() -> None:
    schema = {"properties": {"x": {"$ref": "#/$defs/a~1b~0c"}}, "$defs": {"a/b~c": {"type": "integer"}}}
    assert ArgumentSchema(schema).parameter_types("x") == {"integer"}


def test_a_long_chain_of_unions_leaves_a_parameter_untyped() -> None:
    unions = {f"U{i}": {"anyOf": [{"$ref": f"#/$defs/U{i + 1}"}]} for i in range(5000)}
    assert ArgumentSchema({"properties": {"x": {"$ref": "#/$defs/U0"}}, "$defs": unions}).parameter_types("x") == ANY


# ---- thinking


@pytest.mark.parametrize("name", sorted(THINK_FORMATS))
def test_thinking_is_separated(name: str) -> None:
    form = THINK_FORMATS[name]
    text = f"{form.begin}\nFirst < {form.end[:-1]}\nsecond.\n{form.end}\n\nThe answer.\n"
    answer = answers("hermes", text, name)
    assert answer == Answer("The answer.\n", f"First < {form.end[:-1]}\nsecond.")
    opened = answers("hermes", text.removeprefix(form.begin), name, opening="open")
    assert opened == answer
    closed = answers("hermes", text, name, opening="closed")
    assert closed == (answer if form.anywhere else Answer(text))


def test_models_that_always_think_may_leave_out_the_opening_tag() -> None:
    for name, form in THINK_FORMATS.items():
        answer = answers("hermes", f"Hm.{form.end}Yes", name)
        assert answer == (Answer("Yes", "Hm.") if form.forced else Answer(f"Hm.{form.end}Yes"))


def test_unfinished_thinking_is_reasoning() -> None:
    assert answers("hermes", "<think>a\n\nb </thin", "qwen3") == Answer("", "a\n\nb </thin")


def test_a_call_ends_thinking() -> None:
    answer = answers("hermes", f"<think>\nI call.\n{write('hermes', TWO)}", "qwen3")
    assert (answer.reasoning, answer.parsed, answer.content) == ("I call.", TWO, "")
    kept = answers("hermes", f"<think>\nI call.\n{write('hermes', TWO)}</think>", "deepseek-r1")
    assert not kept.calls
    assert kept.reasoning == f"I call.\n{write('hermes', TWO)}"


@pytest.mark.parametrize(
    ("name", "calls"),
    [("qwen3", "hermes"), ("qwen3", "qwen3_coder"), ("glm45", "glm47"), ("mimo", "mimo"), ("gemma4", "gemma4"), ("minimax", "minimax-m2"),
     ("mistral", "mistral"), ("seed_oss", "seed_oss"), ("kimi_k2", "kimi_k2")],
)  # fmt: skip
def test_text_like_a_call_does_not_end_thinking(name: str, calls: str) -> None:
    form = THINK_FORMATS[name]
    for like in (f"A\n{form.ended_by[0]} tag, {form.ended_by[0]}.", f"I may\n{write(calls, [('unknown', {})])}."):
        for tools in (calls, None):
            assert answers(tools, f"{form.begin}{like}{form.end}Yes", name) == Answer("Yes", like)
        called = answers(calls, f"{form.begin}{like}\n{write(calls, [('now', {})])}", name)
        assert (called.reasoning, called.parsed) == (like, [("now", {})])


@pytest.mark.parametrize("name", [name for name, form in THINK_FORMATS.items() if form.anywhere])
def test_models_may_think_between_calls(name: str) -> None:
    form = THINK_FORMATS[name]
    text = f"{form.begin}a{form.end}{write(name, [('now', {})])}{form.begin}b{form.end}done"
    answer = answers(name, text, name)
    assert (answer.reasoning, answer.content, answer.parsed) == ("ab", "done", [("now", {})])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("<think>\nab\n</think>\n\nyes", 19),
        ("<think>ab", 9),
        ("no thought", 0),
        ("<think>é</think>", 17),
        ("<think>ab</thi", 14),
        ("<think><tool_call>a\n<tool_call></think>b", 39),
    ],
)
def test_reasoning_tokens_are_those_inside_the_tags(text: str, count: int) -> None:
    for pieces in ([text], list(text)):
        parser = text_parser("hermes", "qwen3")
        read(parser, pieces)
        assert parser.reasoning_tokens == count


# ---- any text

TAGS = sorted({tag for form in TOOL_FORMATS.values() for tag in (*form.begins, *form.tags)})
PIECES = [*TAGS, "<think>", "</think>", "<|channel>thought\n", "<channel|>", "[THINK]", "[/THINK]", "get_weather", "now", "city", "days"]
PIECES += ['"', "'", "{", "}", "[", "]", ":", ",", "=", "(", ")", "\\", "\n", " ", ";", ">", '">', "```json\n", "```"]
PIECES += ["name", "arguments", '{"name": "now", "arguments": {', "call:now{", "function", "functions.", ":0", "1", "true", "é", "😀"]
outputs = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30)


@settings(max_examples=FUZZ_EXAMPLES)
@given(st.sampled_from(FORMATS), st.sampled_from([None, *sorted(THINK_FORMATS)]), outputs, st.data())
def test_any_text_is_read_the_same_in_any_pieces(name: str, thinking: str | None, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    whole = read(text_parser(name, thinking), [text])
    assert read(text_parser(name, thinking), pieces) == whole
    assert read(text_parser(name, thinking), list(text)) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read(text_parser(name, thinking), [text[:cut], text[cut:]]) == whole
    assert all(function in TOOLS for function, _ in whole.calls)


@settings(max_examples=FUZZ_EXAMPLES)
@given(st.sampled_from(FORMATS), st.lists(st.dictionaries(st.just("city"), st.text()), min_size=1, max_size=3))
@example("mimo", [{"city": "{}"}])
def test_any_text_survives_as_an_argument(name: str, arguments: list[dict[str, str]]) -> None:
    unwritable = ("</parameter>", "</arg_value>", '<|"|>', "\r", "\x00")
    calls = [("get_weather", each) for each in arguments]
    if any(mark in each.get("city", "") for each in arguments for mark in unwritable):
        return
    answer = read(text_parser(name), list(write(name, calls)))
    assert answer.parsed == calls
    assert answer.content == ""
