"""Required and strict calls: the grammar of each format, and that its texts are calls that satisfy their schemas."""

from __future__ import annotations

import functools
import json
import random
import re
from importlib.util import find_spec
from typing import Any

import jsonschema
import numpy as np
import pytest
from formats import TOOLS, Answer, read, text_parser
from front import END_OF_TEXT, IM_END, VOCAB, byte_tokenizer
from test_harmony import HARMONY_TOKENS

from runtime.constrained.backends import make_backend
from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import allowed_tokens, mask_words
from runtime.entrypoints.grammar_process import vocabulary_of
from runtime.errors import RequestError
from runtime.parsers.call_grammar import CALL_NUMBER
from runtime.parsers.output_format import OutputFormat, OutputRequest
from runtime.parsers.registry import TOOL_FORMATS
from runtime.sampling_params import GrammarSpec, SamplingParams
from runtime.text.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer(more=HARMONY_TOKENS)
SIZE = VOCAB + len(HARMONY_TOKENS)
INSTALLED = [name for name in ("llguidance", "xgrammar") if find_spec(name)]
BACKENDS = {name: make_backend(name, vocabulary_of(TOKENIZER, (IM_END, END_OF_TEXT), SIZE)) for name in INSTALLED}
SCHEMAS = {
    **TOOLS,
    "strict": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a b", "c"]},
            "count": {"type": "integer"},
            "flag": {"type": ["boolean", "null"]},
            "items": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
            "id": {"type": "string", "pattern": "^[a-z]{2}$"},
            "text": {"type": "string"},
        },
        "required": ["kind", "items", "text"],
    },
    "choose": {
        "$ref": "#/$defs/Choice",
        "$defs": {
            "Choice": {
                "type": "object",
                "properties": {
                    "color": {"$ref": "#/$defs/Color"},
                    "other": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
                    "mode": {"enum": ["auto", 1, None]},
                    "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 5}, {"const": "all"}]},
                },
                "required": ["color", "other", "mode", "days"],
            },
            "Color": {"type": "string", "enum": ["red", "größer", 'say "hi"']},
        },
    },
}
PROMPT = [*b"hi"]


def sample(part: dict[str, Any], draw: random.Random) -> str:
    """A text of a part of a structural tag."""
    match part["type"]:
        case "const_string":
            return part["value"]
        case "any_text":
            return "".join(draw.choice("ab <>{}\"',:\né") for _ in range(draw.randint(0, 6)))
        case "regex":
            return {r"\n{0,2}": "\n\n", "^[a-z]{2}$": "xy", CALL_NUMBER.pattern: "12"}[part["pattern"]]
        case "json_schema":
            return json.dumps(value_of(part["json_schema"], part["json_schema"], draw), ensure_ascii=False)
        case "sequence":
            return "".join(sample(element, draw) for element in part["elements"])
        case "or":
            return sample(draw.choice(part["elements"]), draw)
        case "tag":
            return part["begin"] + sample(part["content"], draw) + part["end"]
        case "tags_with_separator":
            count = 1 if part.get("stop_after_first") else draw.randint(int(part.get("at_least_one", False)), 3)
            return part["separator"].join(sample(draw.choice(part["tags"]), draw) for _ in range(count))
        case "triggered_tags":
            return "Text. " + sample(draw.choice(part["tags"]), draw)
    raise AssertionError(part)


def value_of(node: Any, root: Any, draw: random.Random) -> Any:
    """A value of a schema."""
    if "$ref" in node:
        return value_of(root["$defs"][node["$ref"].removeprefix("#/$defs/")], root, draw)
    if "enum" in node or "const" in node:
        return draw.choice(node.get("enum") or [node["const"]])
    if "anyOf" in node:
        return value_of(draw.choice(node["anyOf"]), root, draw)
    kind = node.get("type", "object")
    match draw.choice(kind) if isinstance(kind, list) else kind:
        case "object":
            chosen = [name for name in node.get("properties", {}) if name in node.get("required", ()) or draw.random() < 0.5]
            return {name: value_of(node["properties"][name], root, draw) for name in chosen}
        case "array":
            return [value_of(node["items"], root, draw) for _ in range(draw.randint(0, 2))]
        case "string":
            return "xy" if "pattern" in node else draw.choice(["", 'say "hi"\n', "ünï"])
        case "integer":
            return draw.randint(node.get("minimum", -99), node.get("maximum", 99))
        case "number":
            return draw.choice([0.5, 3, -1.25])
        case "boolean":
            return draw.random() < 0.5
    return None


def tokens_of(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    """The tokens of a text in which control tokens are spelled."""
    return tokenizer.encode(text, add_special_tokens=False)


@functools.cache
def compiled(grammar: str, backend: str) -> Any:
    """A structural tag, compiled once as in a server."""
    library = BACKENDS[backend]
    return library.compile(library.translate(GrammarSpec("structural_tag", grammar)))


def accepts(grammar: str, text: str, backend: str = "llguidance") -> bool:
    """Whether a structural tag allows a text and then its end."""
    return walks(Constraint(compiled(grammar, backend).fork(), frozenset((IM_END, END_OF_TEXT))), [*tokens_of(text), IM_END])


def walks(constraint: Constraint, tokens: list[int]) -> bool:
    """Whether a constraint allows these tokens."""
    row = np.zeros(mask_words(SIZE), dtype=np.int32)
    for token in tokens:
        if constraint.restricts:
            constraint.fill(row)
            if not allowed_tokens(row)[token]:
                return False
        constraint.commit(token)
    return not constraint.error


def adapted(
    name: str, thinking: str | None = None, prompt: list[int] = PROMPT, sampling: SamplingParams | None = None, **request: Any
) -> SamplingParams:
    """The sampling parameters of a request with tools."""
    output = OutputRequest(**{"tools": SCHEMAS, "rule": "required", **request})
    return OutputFormat(TOKENIZER, name, thinking).adapt(sampling or SamplingParams(), output, prompt)


def part_of(sampling: SamplingParams) -> dict[str, Any]:
    assert sampling.structural_tag is not None
    return json.loads(sampling.structural_tag)["format"]


def called(name: str, text: str) -> Answer:
    """What the parser reads in a text."""
    tools = {**SCHEMAS}
    parser = text_parser(name)
    parser._reader.tools = tools
    return read(parser, [text])


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_texts_of_the_grammar_are_valid_calls(name: str, backend: str) -> None:
    sampling = adapted(name)
    draw = random.Random(5)
    for _ in range(40):
        text = sample(part_of(sampling), draw)
        if re.search(r"(<\|\"\|>|</\w+>)[ab<>{}\"',: \né]*\1", text) and '<|"|>' not in text:
            continue  # free text that spells its own end
        assert accepts(sampling.structural_tag or "", text, backend), text
        answer = called(name, text)
        assert answer.calls, text
        assert not answer.content.strip(), text
        for function, arguments in answer.parsed:
            jsonschema.validate(arguments, SCHEMAS[function])


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax-m2", "pythonic"])
def test_schemas_that_references_make_large_are_refused(name: str) -> None:
    wide = {"A": {"anyOf": [{"type": "string"}] * 300}}
    schema = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/A"} for i in range(300)}, "$defs": wide}
    with pytest.raises(RequestError, match="too many definitions") as caught:
        adapted(name, tools={"f": schema})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_the_grammar_refuses_text_and_unknown_functions(name: str) -> None:
    sampling = adapted(name, parallel=False)
    draw = random.Random(6)
    text = sample(part_of(sampling), draw)
    grammar = sampling.structural_tag or ""
    assert accepts(grammar, text)
    assert not accepts(grammar, f"Sure. {text}")
    assert not accepts(grammar, "")
    for function in SCHEMAS:
        text = text.replace(function, "absent")
    assert not accepts(grammar, text)


def test_arguments_are_an_object_whatever_else_the_schema_allows() -> None:
    grammar = adapted("hermes", tools={"f": {"type": ["object", "null"]}}).structural_tag or ""
    assert accepts(grammar, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>')


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "deepseekv31", "kimi_k2", "phi4_mini_json", "gpt-oss"])
@pytest.mark.parametrize("kinds", ["string", ["array", "null"]])
def test_arguments_that_cannot_be_an_object_are_refused(name: str, kinds: Any) -> None:
    """Before a grammar is compiled, because xgrammar would enforce an object."""
    with pytest.raises(RequestError, match=re.escape(f"have the type {json.dumps(kinds)}, so no call satisfies them.")) as caught:
        adapted(name, tools={"f": {"type": kinds}})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_strict_calls_may_follow_free_text(name: str) -> None:
    sampling = adapted(name, rule="strict")
    grammar = sampling.structural_tag or ""
    call = sample(part_of(adapted(name, parallel=False)), random.Random(7))
    assert accepts(grammar, "Only text <1> {x}.")
    assert accepts(grammar, f"I look.\n{call}")
    begin = part_of(sampling)["triggers"][0]
    assert not accepts(grammar, f"I look.\n{begin}nonsense")


def test_thinking_comes_before_the_grammar() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    unknown = adapted("hermes", "qwen3")
    assert accepts(unknown.structural_tag or "", f"<think>\nI call <tool_call>\n</think>\n\n{call}")
    assert accepts(unknown.structural_tag or "", call)
    opened = adapted("hermes", "qwen3", prompt=tokens_of("<|im_start|>assistant\n<think>\n"))
    assert opened.grammar_after == (), "the tag is no token of this tokenizer"
    assert accepts(opened.structural_tag or "", f"free < text</think>\n\n{call}")
    assert not accepts(opened.structural_tag or "", call)
    closed = adapted("hermes", "qwen3", prompt=tokens_of("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
    assert closed.grammar_after == ()
    assert not accepts(closed.structural_tag or "", f"<think>a</think>{call}")


@pytest.mark.parametrize(
    ("given", "text", "other"),
    [
        ({"json_schema": '{"type": "object"}'}, '{"a": 1}', "[]"),
        ({"json_schema": "{}"}, "[1]", "no"),
        ({"json_schema": "true"}, "[1]", "no"),
        ({"regex": "a+"}, "aa", "b"),
        ({"ebnf": 'root ::= "{" b+\nb ::= [a-c]'}, "{abc", "{"),
        ({"structural_tag": json.dumps({"format": {"type": "const_string", "value": "x"}})}, "x", "y"),
    ],
)
def test_grammars_of_text_begin_after_thinking_too(given: dict[str, str], text: str, other: str) -> None:
    wanted = SamplingParams(**given)
    unknown = adapted("hermes", "qwen3", sampling=wanted, tools={}, rule="free").structural_tag or ""
    forced = adapted("hermes", "deepseek-r1", sampling=wanted, tools={}, rule="free").structural_tag or ""
    for grammar, thought in ((unknown, ""), (unknown, "<think>\na\n</think>\n\n"), (forced, "a </thin</think>\n")):
        assert accepts(grammar, thought + text)
        assert not accepts(grammar, thought + other)
    assert not accepts(forced, text)
    assert adapted("hermes", None, sampling=wanted, tools={}, rule="free") == wanted


def test_a_grammar_waits_for_the_token_that_ends_thinking() -> None:
    tokenizer = byte_tokenizer(more=("<think>", "</think>"))
    output = OutputRequest({}, (), True, "free", True)
    sampling = OutputFormat(tokenizer, "hermes", "deepseek-r1").adapt(SamplingParams(regex="a+"), output, PROMPT)
    assert sampling.grammar_after == (tokenizer.token_id("</think>"),)
    assert accepts(sampling.structural_tag or "", "\n\naa")


def test_a_grammar_of_a_continued_message_does_not_wait_for_thinking() -> None:
    form = OutputFormat(byte_tokenizer(more=("<think>", "</think>")), "hermes", "deepseek-r1")
    sampling = form.adapt(SamplingParams(regex="a+"), OutputRequest({}, continues=True), tokens_of("<|im_start|>assistant\nSo"))
    assert sampling.grammar_after == ()
    assert accepts(sampling.structural_tag or "", "aa")
    assert not accepts(sampling.structural_tag or "", "b</think>aa")


@pytest.mark.parametrize("more", [(), ("<think>", "</think>")])
def test_a_grammar_without_reasoning_holds_from_the_first_token(more: tuple[str, ...]) -> None:
    form, wanted = OutputFormat(byte_tokenizer(more=more), "hermes", "qwen3"), SamplingParams(regex="a+")
    sampling = form.adapt(wanted, OutputRequest({}, thinks=False), PROMPT)
    assert (sampling.grammar, sampling.grammar_after) == (wanted.grammar, ())
    calls = form.adapt(SamplingParams(), OutputRequest(SCHEMAS, rule="required", thinks=False), PROMPT)
    assert calls.grammar_after == ()
    assert accepts(calls.structural_tag or "", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not accepts(calls.structural_tag or "", '<think>a</think><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    opened = form.adapt(wanted, OutputRequest({}, thinks=False), tokens_of("<|im_start|>assistant\n<think>\n"))
    assert opened.structural_tag is not None, "the prompt has opened the thinking, so the grammar follows its end"
    always = OutputFormat(byte_tokenizer(more=more), "hermes", "deepseek-r1").adapt(wanted, OutputRequest({}, thinks=False), PROMPT)
    assert always.structural_tag is not None or always.grammar_after, "the model thinks whatever the request says"


def test_text_of_a_schema_or_calls() -> None:
    sampling = adapted("hermes", sampling=SamplingParams(json_schema='{"type": "object"}'), rule="free")
    grammar = sampling.structural_tag or ""
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, "text")
    ebnf = adapted("hermes", sampling=SamplingParams(ebnf='root ::= "a"'), rule="free").structural_tag or ""
    assert accepts(ebnf, "a")
    assert accepts(ebnf, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    with pytest.raises(RequestError, match="leave no room"):
        adapted("hermes", sampling=SamplingParams(regex="a+"), rule="required")
    tag = '{"structures": [{"begin": "<a>"}], "triggers": ["<a>"]}'
    for malformed in (SamplingParams(json_schema="{"), SamplingParams(structural_tag=tag), SamplingParams(structural_tag="[]")):
        assert adapted("hermes", sampling=malformed, rule="free") == malformed, "left to the compiler, which refuses it"


def test_mistral_calls_have_the_form_of_the_vocabulary() -> None:
    tokenizer = byte_tokenizer(more=["[TOOL_CALLS]", "[ARGS]"])
    library = make_backend("llguidance", vocabulary_of(tokenizer, (IM_END, END_OF_TEXT), VOCAB + 2))
    text = '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]ns.run-2[ARGS]{"command": "ls"}'
    for parallel in (True, False):
        output = OutputRequest(SCHEMAS, rule="required", parallel=parallel)
        sampling = OutputFormat(tokenizer, "mistral", None).adapt(SamplingParams(), output, PROMPT)
        grammar = library.compile(library.translate(GrammarSpec("structural_tag", sampling.structural_tag or "")))
        for given, allowed in (
            (text, parallel),
            (text[: text.index("{}") + 2], True),
            ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]', False),
        ):
            constraint = Constraint(grammar.fork(), frozenset((IM_END, END_OF_TEXT)))
            assert walks(constraint, [*tokens_of(given, tokenizer), IM_END]) == allowed
    assert called("mistral", text).parsed == [("now", {}), ("ns.run-2", {"command": "ls"})]


def test_harmony_calls_stand_in_the_commentary_channel() -> None:
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Hi."
    required = adapted("gpt-oss").structural_tag or ""
    assert accepts(required, call)
    assert accepts(required, thought + call)
    assert not accepts(required, thought + final)
    assert not accepts(required, thought + call.replace("now", "get_weather").replace("{}", '{"days": "x"}'))
    strict = adapted("gpt-oss", rule="strict").structural_tag or ""
    assert accepts(strict, thought + call)
    assert accepts(strict, thought + final)
    text = adapted("gpt-oss", sampling=SamplingParams(json_schema='{"type": "object"}'), tools={}, rule="free").structural_tag or ""
    assert accepts(text, f"{thought}<|channel|>final<|message|>{{}}")
    assert not accepts(text, thought + final)
    ebnf = adapted("gpt-oss", sampling=SamplingParams(ebnf='root ::= "a"'), tools={}, rule="free")
    assert accepts(ebnf.structural_tag or "", f"{thought}<|channel|>final<|message|>a")
    assert not accepts(ebnf.structural_tag or "", "a")
