"""The grammar of an output: optional thinking, then the request's grammar or tool calls in the model's format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from msgspec import structs, to_builtins

from runtime.constrained.json_schema import load_json
from runtime.constrained.structural_tag import Ebnf, Format, JsonSchema, Regex, Tag, parse_structural_tag
from runtime.errors import GrammarError
from runtime.parsers.call_grammar import ANY_TEXT, CallGrammar, one_of, optional, sequence
from runtime.sampling_params import GrammarSpec, SamplingParams

CallRule = Literal["free", "strict", "required"]
"""free: calls are not constrained; strict: calls follow the schema of their function; required: the answer consists of such calls."""
LINE_BREAKS = Regex(r"\n{0,2}")
"""The line breaks that models write between thinking and the answer."""


def answer_part(
    spec: GrammarSpec | None, calls: CallGrammar | None, rule: CallRule, parallel: bool, as_text: Callable[[Format], Format]
) -> Format | None:
    """The grammar of an answer without its thinking; None if the answer is not constrained.

    Args:
        spec: the request's grammar for text, or None.
        calls: the grammar of calls; None if there are no tools.
        as_text: wraps a part in the form that the format requires for text.

    Raises:
        GrammarError: the grammar cannot be combined with the calls.
    """
    text = None if spec is None else spec_part(spec)
    if calls is None or (spec is not None and text is None):
        return text and as_text(text)
    if spec is not None and rule == "required" and spec.kind != "json_schema":
        raise GrammarError(spec.kind, "Required tool calls leave no room for text.")
    if rule == "required":
        return calls.calls(parallel)
    if text is not None:
        return one_of(as_text(text), calls.calls(parallel))
    return calls.text_with_calls(parallel) if rule == "strict" else None


def spec_part(spec: GrammarSpec) -> Format | None:
    """Convert a grammar to a part of a structural tag; None if it is invalid, which the compiler then reports."""
    if spec.kind == "regex":
        return Regex(spec.text)
    if spec.kind == "ebnf":
        return Ebnf(spec.text)
    try:
        given = parse_structural_tag(spec.text) if spec.kind == "structural_tag" else load_json(spec.kind, spec.text)
    except GrammarError:
        return None
    return JsonSchema(given) if isinstance(given, dict | bool) else given


def after_thinking(answer: Format, begin: str, end: str) -> Format:
    """`answer`, optionally preceded by thinking."""
    return sequence(optional(sequence(Tag(begin, ANY_TEXT, end), LINE_BREAKS)), answer)


def with_part(sampling: SamplingParams, part: Format, after: tuple[int, ...] = ()) -> SamplingParams:
    """`sampling` with `part` instead of its own grammar. It starts after the tokens `after`, if there are any."""
    text = json.dumps({"type": "structural_tag", "format": to_builtins(part)}, ensure_ascii=False, separators=(",", ":"))
    return structs.replace(sampling, json_schema=None, regex=None, ebnf=None, structural_tag=text, grammar_after=after)
