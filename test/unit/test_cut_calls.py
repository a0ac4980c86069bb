"""Calls that the length limit or a stop string cuts off leave no markup in the content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from formats import FUZZ_EXAMPLES, Answer, read, text_parser, write
from front import ScriptedScheduler, front
from hypothesis import given, settings
from hypothesis import strategies as st
from test_harmony import CALL, THOUGHT, encode, parser

from event_loop import in_event_loop
from runtime.entrypoints.openai.answer_reader import AnswerReader
from runtime.managers.messages import Finish, TextOut
from runtime.managers.telemetry.progress import Progress
from runtime.parsers.registry import THINK_FORMATS, TOOL_FORMATS
from runtime.parsers.thinking import Opening

FORMATS = sorted(TOOL_FORMATS)
ARGUMENTS = {
    "city": 'Ü "<x> & \\ {[}\n', "days": 12345, "exact": True, "filter": {"y": [1, None, "}"]}, "tags": ["a, b", "]"], "free": "1 & 2",
}  # fmt: skip
ONE = [("get_weather", ARGUMENTS)]
TWO = [*ONE, ("ns.run-2", {"command": "ls\n\n"})]


def cut(name: str, text: str, thinking: str | None = None, cut_off: bool = True, **options: Any) -> Answer:
    """The answer to an output that ends here; the same in pieces of one and three characters, and in one piece."""
    whole = read(text_parser(name, thinking, **options), [text], cut_off)
    for size in (1, 3):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(text_parser(name, thinking, **options), pieces, cut_off) == whole, text
    return whole


def check_calls(answer: Answer, whole: Answer) -> None:
    """The calls are those of the whole text, except that the arguments of the last may be incomplete."""
    for at, ((name, arguments), (whole_name, whole_arguments)) in enumerate(zip(answer.calls, whole.calls, strict=False), 1):
        assert name == whole_name
        assert whole_arguments.startswith(arguments)
        assert arguments == whole_arguments or at == len(answer.calls)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_cut_anywhere_leave_no_content(name: str) -> None:
    text = write(name, TWO)
    whole = cut(name, text)
    assert whole.parsed == TWO
    for end in range(len(text)):
        answer = cut(name, text[:end])
        assert (answer.content, answer.reasoning) == (text[:1] if end == 1 else "", ""), "a single character may be text"
        check_calls(answer, whole)


@pytest.mark.parametrize("name", FORMATS)
def test_text_before_a_call_that_is_cut_stays(name: str) -> None:
    text = f"I look.\n{write(name, [('get_weather', {'city': 'B', 'days': 12}), ('now', {})])}"
    for end in range(len("I look.\n<") + 1, len(text)):
        assert cut(name, text[:end]).content == "I look."


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_may_also_end_within_a_call(name: str) -> None:
    text = write(name, ONE)
    whole = read(text_parser(name), [text])
    for end in range(1, len(text)):
        answer = cut(name, text[:end], cut_off=False)
        assert answer.content == ("" if answer.calls else text[:end])
        check_calls(answer, whole)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_words_and_lists_that_are_cut_leave_no_content(name: str) -> None:
    for arguments in ({"rate": -1.25e300}, {"exact": False}, {"note": None}, {"tags": []}, {"tags": ["a", "b"]}, {"filter": {}}, {}):
        text = write(name, [("get_weather", arguments)])
        whole = cut(name, text)
        for end in range(2, len(text) + 1):
            answer = cut(name, text[:end])
            assert answer.content == ""
            check_calls(answer, whole)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thinking", ["qwen3", "minimax", "gemma4", "mistral"])
def test_a_call_cut_after_thinking_leaves_no_content(name: str, thinking: str) -> None:
    form = THINK_FORMATS[thinking]
    before = f"{form.begin}Hm.{form.end}\n\n"
    text = f"{before}{write(name, [('get_weather', {'city': 'B', 'days': 12, 'exact': True})])}"
    whole = cut(name, text, thinking)
    assert len(whole.calls) == 1
    for end in range(len(before) + 2, len(text)):
        answer = cut(name, text[:end], thinking)
        assert (answer.content, answer.reasoning) == ("", "Hm.")
        check_calls(answer, whole)


@pytest.mark.parametrize("thinking", sorted(THINK_FORMATS))
@pytest.mark.parametrize("opening", ["unknown", "open"])
def test_a_part_of_the_opening_tag_is_dropped(thinking: str, opening: Opening) -> None:
    begin = THINK_FORMATS[thinking].begin
    for end in range(2, len(begin)):
        assert cut("hermes", f"\n{begin[:end]}", thinking, opening=opening) == Answer()
        ended = cut("hermes", begin[:end], thinking, cut_off=False, opening=opening)
        assert ended.content + ended.reasoning == begin[:end], "the model ended the answer itself"


@pytest.mark.parametrize(
    ("name", "thinking"),
    [
        ("hermes", "qwen3"),
        ("glm47", "glm45"),
        ("minimax-m2", "minimax"),
        ("gemma4", "gemma4"),
        ("mistral", "mistral"),
        ("kimi_k2", "kimi_k2"),
    ],
)
def test_a_call_that_ends_thinking_may_be_cut(name: str, thinking: str) -> None:
    before = f"{THINK_FORMATS[thinking].begin}Hm.\n"
    text = f"{before}{write(name, [('get_weather', {'city': 'B', 'days': 12})])}"
    for end in range(len(before) + 2, len(text)):
        for separate in (True, False):
            options = {} if separate else {"opening": "open"}
            answer = cut(name, text[:end], thinking, **options)
            assert answer.content == ""
            assert answer.reasoning.endswith("Hm.")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"name": "Bob", "age": 5, "arguments": {}}'),
        ("llama3", '{"type": "circle", "radius": 5.25, "tags": ["a"]}'),
        ("phi4_mini_json", 'from functools import x; functools[x], functools[{"name": "Bob"}]'),
        ("pythonic", "[1, 2, [3]] and [x] or [link](http://x.org)"),
        ("hermes", "a < b, <b>x</b>, [TOOL] {x}"),
    ],
)
def test_text_that_only_looks_like_a_call_stays(name: str, text: str) -> None:
    for end in range(1, len(text) + 1):
        assert cut(name, text[:end]) == Answer(text[:end])


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("hermes", "<tool_call> is a tag", "<tool_call> i"),
        ("hermes", '<tool_call>{"name": "drop_tables", "arguments": {"x": 12}}</tool_call>', '<tool_call>{"name": "d'),
        ("glm47", "<tool_call>drop_tables<arg_key>x</arg_key><arg_value>12</arg_value></tool_call>", "<tool_call>d"),
        ("deepseekv31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>drop tables", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>d"),
        ("llama3", '<|python_tag|>print("x")', "<|python_tag|>p"),
    ],
)
def test_a_call_that_is_cut_is_text_once_it_names_no_function(name: str, text: str, shown: str) -> None:
    for end in range(2, len(text) + 1):
        assert cut(name, text[:end]) == Answer(text[:end] if text[:end].startswith(shown) else "")


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_that_break_off_before_the_end_are_text(name: str) -> None:
    text = write(name, [("get_weather", {"days": 12})])
    at = text.index("12")
    broken = f"{text[:at]}\x00 and\nmore {text[at:]} end"
    for cut_off in (True, False):
        answer = cut(name, broken, cut_off=cut_off)
        assert answer.content.endswith("end")


def test_a_long_name_ends_a_call_at_the_same_place_in_any_pieces() -> None:
    for name in ("glm47", "gemma4", "deepseekv31", "mimo", "kimi_k2"):
        call = write(name, [("now", {})])
        begin = write(name, [("x" * 300, {})]).partition("x" * 300)[0]
        answer = cut(name, f"{begin}{'x' * 300}{call}")
        assert answer.calls == [("now", "{}")]
        assert answer.content == f"{begin}{'x' * 300}"


def test_character_references_are_replaced_in_any_pieces() -> None:
    before = "<tool_call><function=get_weather><parameter=city>"
    value = "&lt;&amp;amp; &notit; &#x41;&#66 &no such &CounterClockwiseContourIntegral;&" + "y" * 40
    plain = "<&amp; ¬it; AB &no such ∳&" + "y" * 40
    whole = cut("mimo", f"{before}{value}</parameter></function></tool_call>")
    assert whole.parsed == [("get_weather", {"city": plain})]
    for end in range(len(value)):
        answer = cut("mimo", f"{before}{value[:end]}")
        assert answer.content == ""
        check_calls(answer, whole)


def test_strings_with_character_references_arrive_as_they_are_written() -> None:
    one = text_parser("mimo")
    one.feed("<tool_call><function=get_weather><parameter=city>a", [])
    deltas = [[delta.text for delta in one.feed(letter, [])] for letter in "b&lt;c"]  # type: ignore[union-attr]
    assert deltas == [["b"], [], [], [], ["<"], ["c"]]


def test_half_of_a_surrogate_pair_at_the_end_is_dropped() -> None:
    text = r'<tool_call>{"name": "get_weather", "arguments": {"city": "a\ud83d\ude00b\n"}}</tool_call>'
    whole = cut("hermes", text)
    for end in range(2, len(text)):
        answer = cut("hermes", text[:end])
        assert answer.content == ""
        check_calls(answer, whole)


TAGS = sorted({tag for form in TOOL_FORMATS.values() for tag in (*form.begins, *form.tags)})
PIECES = [*TAGS, "<think>", "</think>", "get_weather", "now", "city", "days", '"', "{", "}", "[", "]", ":", ",", "=", "(", ")", "\\"]
PIECES += [
    "\\ud83d",
    "\n",
    " ",
    ">",
    '">',
    "```",
    '{"name": "now", "arguments": {',
    "call:now{",
    "functions.",
    ":0",
    "1",
    "true",
    "é",
    "x" * 200,
]


@settings(max_examples=FUZZ_EXAMPLES)
@given(st.sampled_from(FORMATS), st.sampled_from([None, "qwen3", "gemma4"]), st.lists(st.sampled_from(PIECES), max_size=25), st.booleans())
def test_any_text_that_is_cut_is_read_the_same_in_any_pieces(name: str, thinking: str | None, pieces: list[str], cut_off: bool) -> None:
    whole = cut(name, "".join(pieces), thinking, cut_off)
    assert read(text_parser(name, thinking), pieces, cut_off) == whole


# ---- gpt-oss


@pytest.mark.parametrize("before", ["", THOUGHT], ids=["call", "thinking"])
def test_a_message_to_a_function_cut_anywhere_leaves_no_content(before: str) -> None:
    text = f'{before}{CALL.removesuffix("}<|call|>")}, "days": 12.5, "exact": true, "note": "\\ud83d\\ude00"}}'
    ids = encode(text)
    one = parser()
    ((name, whole),) = Answer.of([*one.feed("", ids), *one.finish(cut_off=True)]).calls
    for end in range(len(encode(before)), len(ids)):
        for size in (1, 3, end + 1):
            one = parser()
            fed = [delta for at in range(0, end, size) for delta in one.feed("", ids[at : min(at + size, end)])]
            answer = Answer.of([*fed, *one.finish(cut_off=True)])
            assert answer.content == ""
            assert all(call == name and whole.startswith(arguments) for call, arguments in answer.calls)


def test_malformed_messages_to_functions_stay_text() -> None:
    for message in ("no json", '{"days": oops}', "[1]"):
        one = parser()
        text = f"<|channel|>commentary to=functions.now<|message|>{message}"
        answer = Answer.of([*one.feed("", encode(text)), *one.finish(cut_off=True)])
        assert answer.content.endswith(message[-5:])


# ---- answers


@pytest.mark.parametrize(
    ("finish", "reason"), [(Finish(reason="length"), "length"), (Finish(reason="stop", matched="STOP"), "stop")], ids=["length", "stop"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_the_reason_says_how_a_call_was_cut(name: str, finish: Finish, reason: str) -> None:
    text = write(name, ONE)
    text = text[: text.index("12345") + 3]
    update = AnswerReader(text_parser(name)).read(TextOut(rid="r", text=text, token_ids=[0], progress=Progress(1), finish=finish))
    answer = Answer.of(list(update.deltas))
    assert (answer.content, len(answer.calls)) == ("", 1)
    assert update.finish is not None
    assert update.finish.reason == reason


@in_event_loop
async def test_a_server_returns_no_markup_of_a_call_that_the_length_cuts() -> None:
    call = write("glm47", [("weather", {"city": "Bonn", "days": 12345})])
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": properties}}}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<arg_key>{{ tools }}"
    async with front(ScriptedScheduler(say=lambda request: call), template=template, context_length=4000) as f:
        for limit in range(2, len(call), 7):
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": limit}
            choice = (await f.post("/v1/chat/completions", body)).json()["choices"][0]
            assert choice["finish_reason"] == "length"
            assert not choice["message"]["content"]
            *chunks, _ = await f.events("/v1/chat/completions", {**body, "stream": True})
            deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
            assert not any(delta.get("content") for delta in deltas)
            streamed = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
            calls = choice["message"].get("tool_calls", ())
            assert "".join(streamed) == "".join(each["function"]["arguments"] for each in calls)
            assert json.dumps({"city": "Bonn", "days": 12345}).startswith("".join(streamed))
