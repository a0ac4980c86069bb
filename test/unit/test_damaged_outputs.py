"""Outputs with errors lose no text: what is not read as a call is content, reasoning or a part of the arguments."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from formats import FUZZ_EXAMPLES, Answer, read, text_parser, write
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.parsers.deltas import CallStart
from runtime.parsers.registry import THINK_FORMATS, TOOL_FORMATS

FORMATS = sorted(TOOL_FORMATS)
LETTERS = "абвгдежзиклмнопрстуфхцчшщыэюя"
"""Letters that no format uses, so that all of them are the model's text."""
JUNK = f"{LETTERS}<>{{}}[]\"'\\/|=: \n"
DEEPSEEK_TYPE = re.compile("(?<=<｜tool▁call▁begin｜>)[^<\n]*")
"""Always `function`; whatever a model writes instead is ignored."""


def word(rng: random.Random) -> str:
    """A text of the model."""
    return "".join(rng.choices(LETTERS, k=rng.randint(2, 6)))


def some_calls(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Calls of known and unknown functions."""
    weather = {"city": f"{word(rng)} {word(rng)}", "days": 567, "exact": True, "rate": 6.75, "tags": [word(rng), word(rng)]}
    weather |= {"filter": {"y": [5, None, word(rng)]}, "note": rng.choice([word(rng), None]), "free": word(rng)}
    some = {key: weather[key] for key in rng.sample(sorted(weather), rng.randint(0, 5))}
    all_calls = [("now", {}), ("ns.run-2", {"command": f"{word(rng)}\n{word(rng)}"}), ("unknown", {"x": word(rng)})]
    return rng.choices([*all_calls, *[("get_weather", some)] * 3], k=rng.randint(1, 3))


def damaged(rng: random.Random, text: str, tags: list[str]) -> str:
    """`text` with up to three small changes."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at, size, tag = rng.randint(0, len(text)), rng.choice([1, 1, 2, 5, 12]), rng.choice(tags)
        middle = rng.randrange(len(tag))
        text = rng.choice(
            [
                text[:at] + text[at + size :],
                text[:at] + rng.choice(JUNK) + text[at + 1 :],
                text[:at] + rng.choice([rng.choice(JUNK), word(rng), tag]) + text[at:],
                text[:at] + text[at : at + 3 * size] + text[at:],
                text[:at],
                text.replace(tag, tag[:middle] + rng.choice(["", "ж"]) + tag[middle + 1 :], 1),
            ]
        )
    return text


def seen(text: str) -> Counter[str]:
    """The characters of `text` that are the model's own, not the format's."""
    return Counter(letter for letter in text if letter in LETTERS or letter in "56789")


@settings(max_examples=10 * FUZZ_EXAMPLES)
@given(st.sampled_from(FORMATS), st.sampled_from([None, *sorted(THINK_FORMATS)]), st.integers(0, 1 << 32))
def test_damaged_outputs_lose_no_text(name: str, thinking: str | None, seed: int) -> None:
    rng = random.Random(seed)
    form, think = TOOL_FORMATS[name], THINK_FORMATS.get(thinking or "")
    before = f"{think.begin}{word(rng)}.{rng.choice([think.end, ''])}" if think else ""
    tags = [tag for tag in (*form.begins, *form.tags, *(think.tags if think else ())) if tag]
    output = f"{before}{rng.choice(['', word(rng)])} {write(name, some_calls(rng))}{rng.choice(['', word(rng)])}"
    text = damaged(rng, output, tags)
    parser = text_parser(name, thinking)
    deltas = [*parser.feed(text, [0]), *parser.finish()]
    answer = Answer.of(deltas)
    for size in (1, 3):
        assert read(text_parser(name, thinking), [text[at : at + size] for at in range(0, len(text), size)]) == answer, text
    ids = [delta.id for delta in deltas if isinstance(delta, CallStart)]  # Kimi's contain the names
    shown = "".join([answer.content, answer.reasoning, *ids, *(part for call in answer.calls for part in call)])
    expected = DEEPSEEK_TYPE.sub("", text) if name == "deepseekv3" else text
    assert not seen(expected) - seen(shown), (text, answer)


TAGGED = {"glm47": "</arg_value>", **dict.fromkeys(("qwen3_coder", "mimo", "seed_oss", "minimax-m2"), "</parameter>")}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("arguments", [{"city": "Bonn"}, {"days": 7}, {"free": "x"}, {"filter": {"a": 1}}])
def test_a_value_with_a_damaged_end_ends_with_its_call(name: str, arguments: dict[str, Any]) -> None:
    (key,) = arguments
    calls = [("get_weather", arguments), ("ns.run-2", {"command": "ls"}), ("now", {})]
    text = write(name, calls).replace(TAGGED[name], "</paraméter>", 1)
    answer = read(text_parser(name), list(f"{text} Done."))
    assert answer.parsed[1:] == calls[1:]
    assert answer.content == " Done."
    ((call, written),) = answer.parsed[:1]
    assert call == "get_weather"
    assert "</paraméter>" in written[key]


@pytest.mark.parametrize("name", TAGGED)
def test_the_tags_that_end_a_call_may_be_a_part_of_a_value(name: str) -> None:
    end = write(name, [("now", {})]).removeprefix(write(name, [("now", {})]).partition("now")[0])
    calls = [("get_weather", {"city": f"a {end} b", "free": f"{end}c", "days": 3})]
    text = write(name, calls)
    assert read(text_parser(name), list(text)).parsed == calls
    cut = text[: text.index(" b") + 2]
    for pieces in ([cut], list(cut)):
        answer = read(text_parser(name), pieces, cut_off=True)
        assert [arguments.endswith("b") for _, arguments in answer.calls] == [True], "a value that was cut off does not look complete"


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("key", "value", "written", "content"),
    [
        ("city", "Bonn. Then", '"Bonn. Then', ""),
        ("free", "[1 and", '"[1 and', ""),
        ("days", "12", "12", ""),
        ("tags", '["a", "b', '["a", "b', ""),
        ("days", "12 of them", "12", " of them"),
        ("exact", "perhaps so", "", "perhaps so"),
    ],
)
def test_a_value_within_which_the_model_ends_is_kept(name: str, key: str, value: str, written: str, content: str) -> None:
    text = write(name, [("get_weather", {key: value})])
    text = text[: text.index(value) + len(value)]
    answer = read(text_parser(name), list(text))
    assert answer.calls == [("get_weather", f'{{"{key}": {written}')]
    assert answer.content == content
    assert read(text_parser(name), [text]) == answer


def test_text_that_is_no_literal_ends_a_pythonic_call() -> None:
    for value in ("<oops>", "'a'b", "x'", "[5,: None, 'e"):
        answer = read(text_parser("pythonic"), list(f"[get_weather(city='x', days={value}, now()] Done."))
        assert answer.calls == [("get_weather", '{"city": "x", "days": ')]
        assert answer.content.endswith(", now()] Done.")
    for value, begun in (("['ab', 'c", '["ab", "c'), ("{'a': {'bc", '{"a": {"bc'), ("'a\\", '"a'), ("{'a': (1, 2", '{"a": [1, 2')):
        answer = read(text_parser("pythonic"), [f"[get_weather(city={value}"])
        assert answer == Answer("", "", [("get_weather", f'{{"city": {begun}')])


def test_further_members_of_a_json_call_are_text() -> None:
    answer = read(text_parser("hermes"), ['<tool_call>{"name": "now", "arguments": {}, "id": "x", "city": "Bonn"}</tool_call>'])
    assert (answer.parsed, answer.content) == ([("now", {})], ', "id": "x", "city": "Bonn"')
    broken = read(text_parser("hermes"), ['<tool_call>{"name": "now", "arguments": {}, "id: 5}</tool_call> Done.'])
    assert (broken.parsed, broken.content) == ([("now", {})], ', "id: 5}</tool_call> Done.')


# ---- calls of unknown functions


@pytest.mark.parametrize("name", FORMATS)
def test_calls_beside_a_call_of_an_unknown_function_are_read(name: str) -> None:
    first, unknown, last = ("now", {}), ("drop_tables", {"x": "bobby"}), ("get_weather", {"days": 7})
    for calls in ([unknown, last], [first, unknown, last], [first, unknown], [unknown, first, unknown, unknown, last]):
        text = f"See: {write(name, calls)} Done."
        answer = read(text_parser(name), [text])
        assert read(text_parser(name), list(text)) == answer
        assert answer.parsed == [call for call in calls if call != unknown]
        assert answer.content.count("drop_tables") == answer.content.count("bobby") == calls.count(unknown)
        assert (answer.content[:4], answer.content[-5:]) == ("See:", "Done.")


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_an_unknown_function_in_the_thinking_stays_there(name: str) -> None:
    calls = [("drop_tables", {"x": "bobby"}), ("now", {})]
    begins = TOOL_FORMATS[name].begins
    thinking = next((key for key, form in THINK_FORMATS.items() if form.ended_by and set(form.ended_by) <= set(begins)), None)
    if thinking is not None:
        answer = read(text_parser(name, thinking), [f"{THINK_FORMATS[thinking].begin}Hm. {write(name, calls)}"])
        assert answer.parsed == [("now", {})]
        assert "drop_tables" in answer.reasoning
        assert answer.content == ""
