"""Grammar backends: what they allow, what they refuse and why; constraints and windows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from runtime.constrained.backends import make_backend
from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import GrammarBackend, MaskRow, Matcher, allowed_tokens, mask_words, only_token
from runtime.constrained.llguidance_backend import LlguidanceMatcher
from runtime.constrained.window_masks import WindowMasks
from runtime.errors import GrammarError
from runtime.sampling_params import GrammarSpec
from unit.grammars import VOCAB, compiled, json_tokenizer, vocabulary

CALL = '<f=x>{"a": 1}</f>'
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {"type": "tag", "begin": "<f=x>", "content": {"type": "json_schema", "json_schema": ARGUMENTS}, "end": "</f>"}
FREE_TAG = {"type": "tag", "begin": "<f=y>", "content": {"type": "any_text"}, "end": ["</f>", "</g>"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG, FREE_TAG]}
SPECIAL = {"type": "tag", "begin": "<tool>f", "content": {"type": "json_schema", "json_schema": ARGUMENTS}, "end": ""}
RECURSIVE = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "required": ["x"]}},
}


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    return make_backend(request.param, vocabulary())


@pytest.fixture(scope="module")
def llguidance() -> GrammarBackend:
    return make_backend("llguidance", vocabulary())


def spec_of(kind: str, grammar: Any) -> GrammarSpec:
    return GrammarSpec(kind, grammar if isinstance(grammar, str) else json.dumps(grammar))  # type: ignore[arg-type]


def matches(grammar: Matcher, text: str) -> bool:
    """Whether `text` is a whole text of the grammar, token by token as the masks say."""
    matcher, row = grammar.fork(), np.zeros(mask_words(VOCAB), dtype=np.int32)
    for token in [*json_tokenizer().encode(text, False), 0]:
        assert not matcher.fill(row)
        if not allowed_tokens(row)[token]:
            return False
        if token:
            assert matcher.push(token)
    return True


def structural(format: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


LANGUAGES = [
    ("json_schema", {"type": "object"}, ["{}", '{"a": [1, {"b": null}]}', "{ }"], ["[]", "1", "{", "{}x"]),
    ("json_schema", "true", ["1", '"é"', "[]"], ["x"]),
    ("json_schema", {"enum": ["a", 1, "ü"]}, ['"a"', "1", '"ü"'], ['"b"', "a"]),
    ("json_schema", RECURSIVE, ['{"x":null}', '{"x":{"x":null}}'], ["{}", '{"x":1}']),
    ("json_schema", {"type": "string", "pattern": "^[a-c]{2}$"}, ['"ab"'], ['"a"', '"abd"']),
    ("json_schema", {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
     ["{}", '{"a": 1}'], ['{"a": "x"}']),
    ("json_schema", {"type": "object", "properties": {"propertyNames": {"type": "string"}}, "required": ["propertyNames"]},
     ['{"propertyNames": "x"}'], ["{}", '{"propertyNames": 1}']),
    ("json_schema", {"enum": [{"propertyNames": {}}]}, ['{"propertyNames":{}}'], ["{}"]),
    ("json_schema", {"type": "string", "format": "path", "maxLength": 2}, ['"/a"'], ['"/ab"', "1"]),
    ("json_schema", {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1,1]"], ['["a"]']),
    ("regex", "^[0-9]{3}-(a|b)$", ["123-a"], ["12", "123-ab", ""]),
    ("regex", r"(a|b)/c\$", ["a/c$"], ["a/c", "a"]),
    ("ebnf", 'root ::= "a" (b | "c")+ \nb ::= [0-9]{2}', ["a12c", "ac"], ["a1", "a"]),
    ("structural_tag", {"structures": [{"begin": "<f=x>", "schema": ARGUMENTS, "end": "</f>"}], "triggers": ["<f="]},
     ["", "hi", CALL, f"hi {CALL} there", f"a<f{CALL}{CALL}"], ["<f=z>", '<f=x>{"a":"q"}</f>', '<f=x>{"a":1}']),
    ("structural_tag", structural({**TRIGGERED, "at_least_one": True}), [CALL, f"{CALL}x", "<f=y>abc</g>"], ["", "hi", f" {CALL}"]),
    ("structural_tag", structural({**TRIGGERED, "at_least_one": True, "stop_after_first": True}),
     [CALL, "<f=y>abc</f>"], ["", "hi", f"{CALL}x"]),
    ("structural_tag", structural({**TRIGGERED, "stop_after_first": True}), [CALL, "abc", f"abc{CALL}", ""], [f"{CALL}x"]),
    ("structural_tag", structural({"type": "tags_with_separator", "tags": [TAG, FREE_TAG], "separator": "\n"}),
     ["", CALL, f"{CALL}\n{CALL}"], [f"{CALL}{CALL}", "x"]),
    ("structural_tag",
     structural({"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True, "stop_after_first": True}),
     [CALL], ["", f"{CALL},{CALL}"]),
    ("structural_tag",
     structural({"type": "sequence", "elements": [
         {"type": "const_string", "value": "<t>"}, {"type": "any_text"}, {"type": "const_string", "value": "</t>"},
         {"type": "or", "elements": [{"type": "regex", "pattern": "a/b+"}, {"type": "json_schema", "json_schema": True}]}]}),
     ["<t>x y</t>a/bb", "<t></t>[1]"], ["<t>", "a/b"]),
    ("structural_tag", structural({"type": "sequence", "elements": [{"type": "any_text"}, TAG, {"type": "any_text"}]}),
     [CALL, f"x{CALL}y"], ["x"]),
    ("structural_tag",
     structural({"type": "sequence", "elements": [
         {"type": "const_string", "value": "<t>"}, {"type": "grammar", "grammar": 'root ::= "{" b+\nb ::= [a-c]'}]}),
     ["<t>{ab"], ["<t>{", "{ab", "<t>{ab}"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "grammar", "good", "bad"), LANGUAGES)
def test_a_grammar_matches_its_texts_alone(backend: GrammarBackend, kind: str, grammar: Any, good: list[str], bad: list[str]) -> None:
    made = compiled(backend, spec_of(kind, grammar))
    assert [text for text in good if not matches(made, text)] == []
    assert [text for text in bad if matches(made, text)] == []


def test_a_reference_may_name_an_anchor(llguidance: GrammarBackend) -> None:
    made = compiled(llguidance, spec_of("json_schema", {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "const": 1}}}))
    assert matches(made, "1")
    assert not matches(made, "2")


@pytest.mark.parametrize("value", [2**53 - 1, 2**53 + 2, 2048 - 2**63])
def test_large_integers_are_exact_and_defaults_may_be_larger(llguidance: GrammarBackend, value: int) -> None:
    made = compiled(llguidance, spec_of("json_schema", {"enum": ["a", value], "default": 2**53 + 1, "examples": [2**64]}))
    assert matches(made, str(value))
    assert not matches(made, str(value + 1))


def test_an_empty_sequence_matches_the_empty_text(llguidance: GrammarBackend) -> None:
    made = compiled(
        llguidance, spec_of("structural_tag", structural({"type": "or", "elements": [TAG, {"type": "sequence", "elements": []}]}))
    )
    assert [matches(made, text) for text in ("", CALL, "x")] == [True, True, False]


def test_an_empty_pattern_keeps_what_follows_it(llguidance: GrammarBackend) -> None:
    elements = [{"type": "regex", "pattern": ""}, {"type": "const_string", "value": "<t>"}]
    for kind, alike, others in (("sequence", ["<t>"], ["", "x"]), ("or", ["", "<t>"], ["x"])):
        made = compiled(llguidance, spec_of("structural_tag", structural({"type": kind, "elements": elements})))
        assert [matches(made, text) for text in (*alike, *others)] == [*(True for _ in alike), *(False for _ in others)]


def test_control_tokens_in_tags_are_tokens(llguidance: GrammarBackend) -> None:
    made = compiled(llguidance, spec_of("structural_tag", structural(SPECIAL)))
    row = np.zeros(mask_words(VOCAB), dtype=np.int32)
    made.fork().fill(row)
    assert only_token(row) == json_tokenizer().special_tokens["<tool>"]
    triggered = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [SPECIAL]}
    made = compiled(llguidance, spec_of("structural_tag", structural(triggered)))
    assert matches(made, 'x<tool>f{"a": 1}')
    assert not matches(made, "x<tool>g")


@pytest.mark.parametrize(
    ("kind", "grammar", "text"),
    [
        ("json_schema", {"const": "a <eos>"}, '"a <eos>"'),
        ("json_schema", {"enum": ["<tool>x"]}, '"<tool>x"'),
        ("regex", "<eos>", "<eos>"),
        ("ebnf", 'root ::= "a<tool><end>é"', "a<tool><end>é"),
    ],
)
def test_the_text_of_control_tokens_is_split_into_ordinary_tokens(backend: GrammarBackend, kind: str, grammar: Any, text: str) -> None:
    matcher, row, written = compiled(backend, spec_of(kind, grammar)), np.zeros(mask_words(VOCAB), dtype=np.int32), b""
    while True:
        assert not matcher.fill(row)
        # A text may begin with white space, and xgrammar also allows shorter tokens: follow the text.
        token = next(t for t in np.flatnonzero(allowed_tokens(row)).tolist() if t < 2 or text.encode().startswith(written + bytes_of(t)))
        if token < 2:
            break
        assert matcher.push(token)
        written += bytes_of(token)
    assert written.decode() == text


def bytes_of(token: int) -> bytes:
    return json_tokenizer().token_bytes(token) or b"\xff"


@pytest.mark.parametrize(
    ("kind", "grammar", "reason"),
    [
        ("json_schema", "{", "It is not JSON"),
        ("json_schema", "[1]", "A schema is an object"),
        ("json_schema", "false", "No value satisfies"),
        ("json_schema", {"$ref": "#"}, "refers to itself without an end"),
        ("json_schema", {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "refers to itself without an end"),
        ("json_schema", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "refers to itself without an end"),
        ("json_schema", {"$ref": "#a"}, "Anchor 'a' does not exist"),
        ("json_schema", {"enum": ["a", 1234567890123456789]}, "integer 1234567890123456789 in const or enum cannot be enforced exactly"),
        ("json_schema", {"properties": {"const": {"const": {"id": [2**65]}}}}, "integer 36893488147419103232 in const"),
        ("structural_tag", structural({"type": "json_schema", "json_schema": {"const": 2**53 + 1}}), "integer 9007199254740993 in const"),
        ("json_schema", {"not": {}}, 'Unimplemented keys: \\["not"\\]'),
        ("json_schema", {"type": "string", "format": "json-pointer"}, "Unknown format: json-pointer"),
        ("json_schema", {"type": "array", "uniqueItems": True}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ("json_schema", {"propertyNames": {"pattern": "^a"}}, 'Unimplemented keys: \\["propertyNames"\\]'),
        ("json_schema", {"type": "foo"}, "Invalid type: foo"),
        ("json_schema", '{"const": NaN}', "It is not JSON: "),
        ("json_schema", '{"const": 1e999}', "It is not JSON: "),
        ("json_schema", r'{"const": "\ud800"}', "It is not JSON: "),
        ("json_schema", {"type": ""}, 'Invalid type: ""\\.'),
        ("json_schema", {"type": "<x>"}, "Invalid type: <x>\\."),
        ("json_schema", {"type": []}, "nsatisfiable"),
        ("json_schema", {"type": "object", "properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
        ("json_schema", {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(20)]}, "too large"),
        ("json_schema", {"properties": {f"p{i}": {"pattern": f"^[a-z]{{1,{i}}}$"} for i in range(1, 3000)}}, "too big"),
        ("json_schema", "[" * 200 + "]" * 200, "levels deep"),
        ("regex", "(a", "regex parse error"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(?<=a)b", "look-around"),
        ("regex", "a{5,2}", "the start must be <= the end\\."),
        ("regex", "a{99999999}", "too many expressions constructed\\.$"),
        ("ebnf", "start: <nope>", 'unknown special token: "<nope>"\\.$'),
        ("ebnf", 'start: "a', "lexer error\\.$"),
        ("ebnf", "root ::= " + "(" * 5000, "nested too deeply"),
        ("ebnf", "root ::= )", "[Ff]ailed to convert|[Ee]xpected"),
        ("ebnf", 'root ::= "a" root', "No text matches"),
        ("structural_tag", {"format": {"type": "nope"}}, "Invalid value 'nope'"),
        ("structural_tag", {"format": {"type": "const_string"}}, "missing required field `value`"),
        ("structural_tag", structural({**TRIGGERED, "triggers": ["<g"]}), "begins with none of the triggers"),
        ("structural_tag", structural({"type": "grammar", "grammar": 'root ::= "a"{x'}), "Expected integer"),
        ("structural_tag", structural({"type": "json_schema", "json_schema": False}), "No value satisfies"),
        (
            "structural_tag",
            structural({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": ""}]}),
            "is followed by an empty text",
        ),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(llguidance: GrammarBackend, kind: str, grammar: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=f"The {kind} cannot be used: .*{reason}"):
        compiled(llguidance, spec_of(kind, grammar))


def test_a_refusal_hides_the_grammar_that_the_server_wrote(llguidance: GrammarBackend) -> None:
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {"not": {}}}, "end": "</f>"}
    with pytest.raises(GrammarError, match=r'^The structural_tag cannot be used: Unimplemented keys: \["not"\]\.$'):
        compiled(llguidance, spec_of("structural_tag", structural(tag)))
    with pytest.raises(GrammarError, match=r'^The regex cannot be used: invalid regex "\(\?=a\)b" .* is not supported\.$'):
        compiled(llguidance, spec_of("regex", "(?=a)b"))


def test_only_the_end_is_allowed_behind_a_finished_text(backend: GrammarBackend) -> None:
    matcher, row = compiled(backend, spec_of("regex", "ab")).fork(), np.zeros(mask_words(VOCAB), dtype=np.int32)
    for token in json_tokenizer().encode("ab", False):
        matcher.push(token)
    matcher.fill(row)
    assert np.flatnonzero(allowed_tokens(row)).tolist() == [0, 1]


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_added_tokens_that_the_model_lacks_are_left_out(name: str) -> None:
    """As of a model that was tuned with a new padding token, for which it has no row."""
    pytest.importorskip(name)
    last = json_tokenizer().vocab_size - 1
    assert json_tokenizer().special_tokens["<tool>"] == last
    made = compiled(make_backend(name, vocabulary(last)), spec_of("regex", "[a-z]+"))
    row = np.zeros(mask_words(last), dtype=np.int32)
    assert not made.fork().fill(row)
    assert 0 < allowed_tokens(row)[:last].sum() < last
    assert not allowed_tokens(row)[last:].any()


def test_refusals_by_xgrammar_do_not_name_its_source() -> None:
    pytest.importorskip("xgrammar")
    with pytest.raises(GrammarError) as caught:
        compiled(make_backend("xgrammar", vocabulary()), spec_of("json_schema", {"type": "object", "properties": 5}))
    assert str(caught.value) == "The json_schema cannot be used: properties must be an object."


def test_rejected_tokens_and_masks_change_nothing(backend: GrammarBackend) -> None:
    grammar = compiled(backend, spec_of("json_schema", {"type": "array", "items": {"enum": ["name", 22]}, "minItems": 40}))
    rng, words = np.random.default_rng(5), mask_words(VOCAB)
    matcher, rows, ids = grammar.fork(), [], list[int]()
    for _ in range(24):
        row = np.zeros(words, dtype=np.int32)
        matcher.fill(row)
        rows.append(row)
        allowed = allowed_tokens(row)[:VOCAB]
        assert not matcher.push(int(np.flatnonzero(~allowed)[3]))
        ids.append(int(rng.choice(np.flatnonzero(allowed))))
        assert matcher.push(ids[-1])
    fresh = grammar.fork()
    for token, row in zip(ids, rows, strict=True):
        again = np.zeros(words, dtype=np.int32)
        fresh.fill(again)
        np.testing.assert_array_equal(row, again)
        assert fresh.push(token)


def test_a_fork_leaves_no_trace(backend: GrammarBackend) -> None:
    tree = {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}
    grammar, words, rng = compiled(backend, spec_of("json_schema", tree)), mask_words(VOCAB), np.random.default_rng(1)

    def allowed(matcher: Matcher) -> list[int]:
        row = np.zeros(words, dtype=np.int32)
        assert not matcher.fill(row)
        return [token for token in np.flatnonzero(allowed_tokens(row)).tolist() if token > 1]

    for _ in range(60):
        matcher, path = grammar.fork(), list[int]()
        while len(path) < 20 and (here := allowed(matcher)):
            fork = matcher.fork()
            for _ in range(int(rng.integers(0, 4))):
                if (there := allowed(fork)) and not fork.push(int(rng.choice(there))):
                    raise AssertionError("an allowed token is refused")
            path.append(int(rng.choice(here)))
            assert matcher.push(path[-1])
            fresh = grammar.fork()
            assert all(fresh.push(token) for token in path)
            assert allowed(matcher) == allowed(fresh)


# ---- constraints and windows


def test_a_grammar_starts_behind_its_marker(llguidance: GrammarBackend) -> None:
    constraint = Constraint(compiled(llguidance, spec_of("regex", "ab")).fork(), frozenset({0}), (7, 8))
    states, ahead = [], [8, 7, 7, 8, *json_tokenizer().encode("ab", False), 0, 5]
    while ahead:
        states.append((constraint.restricts, constraint.ended))
        forks = [constraint.fork(), constraint.fork()]
        for token in ahead:  # drafts across the marker
            forks[0].push(token)
        forks[1].push(ahead[0])
        assert (constraint.restricts, constraint.ended) == states[-1]
        constraint.commit(ahead.pop(0))
        assert (constraint.restricts, constraint.ended) == (forks[1].restricts, forks[1].ended)
    letters = len(states) - 6
    assert states == [(False, False)] * 4 + [(True, False)] * (letters + 1) + [(False, True)]
    assert not constraint.error


def test_a_committed_token_that_the_grammar_forbids_is_an_error(llguidance: GrammarBackend) -> None:
    constraint = Constraint(compiled(llguidance, spec_of("regex", "ab")).fork(), frozenset({0}))
    constraint.commit(json_tokenizer().encode("x", False)[0])
    assert "does not allow" in constraint.error


def test_masks_that_take_too_long_are_noticed_in_cpu_time(llguidance: GrammarBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, row = compiled(llguidance, spec_of("regex", "a{90}")), np.zeros(mask_words(VOCAB), dtype=np.int32)
    wall, cpu, took = [0.0], [0.0], {"wall": 0.0, "cpu": 0.0}

    def fill(self: LlguidanceMatcher, row: MaskRow) -> str:
        wall[0], cpu[0] = wall[0] + took["wall"], cpu[0] + took["cpu"]
        return given(self, row)

    given = LlguidanceMatcher.fill
    monkeypatch.setattr(LlguidanceMatcher, "fill", fill)
    monkeypatch.setattr("runtime.constrained.constraint.perf_counter", lambda: wall[0])
    monkeypatch.setattr("runtime.constrained.constraint.thread_time", lambda: cpu[0])

    def masks(count: int, **seconds: float) -> Constraint:
        took.update(seconds)
        constraint = Constraint(grammar.fork(), frozenset({0}))
        for _ in range(count):
            window = WindowMasks(constraint, row[None])
            window.row(())
            window.failure((1,))
        return constraint

    assert not masks(1000, wall=0.009, cpu=0.009).meter.exceeded, "no mask is slow"
    assert not masks(1000, wall=0.5, cpu=0.009).meter.exceeded, "the machine is busy"
    assert not masks(3, wall=0.1, cpu=0.1).meter.exceeded, "the first masks build what later ones use"
    slow = masks(8, wall=0.1, cpu=0.1)
    assert slow.meter.exceeded
    assert not slow.fill(row)
    assert allowed_tokens(row).any()


def test_an_object_may_have_hundreds_of_optional_properties(llguidance: GrammarBackend) -> None:
    schema = {"type": "object", "properties": {f"key_{i}": {"type": "integer"} for i in range(400)}, "additionalProperties": False}
    matcher, row = compiled(llguidance, spec_of("json_schema", schema)).fork(), np.zeros(mask_words(VOCAB), dtype=np.int32)
    for token in json_tokenizer().encode('{"key_3": 1, "key_40": 22, "key_300": 3}', False):
        assert matcher.fill(row) == ""
        assert matcher.push(token)


def test_a_window_knows_the_masks_behind_all_its_paths(llguidance: GrammarBackend) -> None:
    grammar = compiled(llguidance, spec_of("regex", "Q(ZW|JK)Y"))
    first, left, right, after_left, after_right, last = (json_tokenizer().encode(letter, False)[0] for letter in "QZJWKY")
    constraint = Constraint(grammar.fork(), frozenset({0}))
    chain = np.empty((3, mask_words(VOCAB)), dtype=np.int32)
    window = WindowMasks(constraint, chain)

    def allowed(*path: int) -> set[int] | None:
        row = window.row(path)
        return None if row is None else set(np.flatnonzero(allowed_tokens(row)).tolist())

    assert allowed(first, right) == {after_right}
    assert allowed(first, left) == {after_left}
    assert allowed(first) == {left, right}
    assert allowed(left) is None
    assert allowed(left, after_left) is None
    assert allowed(first, right, after_right, last) == {0, 1}
    assert allowed(first, right, after_right, last, 0) is None
    assert window.substitute_forced((), right) == first
    assert window.substitute_forced((first,), last) == last
    assert [window.write(path) for path in ((), (first,), (first, left))] == [True] * 3
    found = [set(np.flatnonzero(allowed_tokens(row)).tolist()) for row in chain]
    assert found == [{first}, {left, right}, {after_left}]
    assert not window.write((left,))
    assert (chain[1] == -1).all()
    again = [WindowMasks(at, np.empty_like(chain)).row(()) for at in (constraint, Constraint(grammar.fork(), frozenset({0})))]
    np.testing.assert_array_equal(*again)
