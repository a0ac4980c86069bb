"""The grammar of an output: optional thinking, then the request's grammar or tool calls in the model's format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from msgspec import structs

from runtime.errors import GrammarError
from runtime.parsers.call_grammar import ANY_TEXT, CallGrammar, Part, json_of, one_of, optional, regex, sequence, tag
from runtime.sampling_params import GrammarSpec, SamplingParams

CallRule = Literal["free", "strict", "required"]
"""free: calls are not constrained; strict: calls follow the schema of their function; required: the answer consists of such calls."""
LINE_BREAKS = regex(r"\n{0,2}")
"""The line breaks that models write between thinking and the answer."""


def answer_part(
    spec: GrammarSpec | None, calls: CallGrammar | None, rule: CallRule, parallel: bool, as_text: Callable[[Part], Part]
) -> Part | None:
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


def spec_part(spec: GrammarSpec) -> Part | None:
    """Convert a grammar to a part of a structural tag; None if it is invalid, which the compiler then reports."""
    if spec.kind == "regex":
        return regex(spec.text)
    if spec.kind == "ebnf":
        return {"type": "grammar", "grammar": spec.text}
    given = _json(spec.text)
    if spec.kind == "json_schema" and isinstance(given, dict | bool):
        return {"type": "json_schema", "json_schema": given}
    if spec.kind == "json_schema" or not isinstance(given, dict):
        return None
    if "structures" not in given:
        return given.get("format")
    tags = [tag(one["begin"], json_of(one.get("schema", {})), one["end"]) for one in given["structures"]]
    return {"type": "triggered_tags", "triggers": given.get("triggers", []), "tags": tags}


def after_thinking(answer: Part, begin: str, end: str) -> Part:
    """`answer`, optionally preceded by thinking."""
    return sequence(optional(sequence(tag(begin, ANY_TEXT, end), LINE_BREAKS)), answer)


def with_part(sampling: SamplingParams, part: Part, after: tuple[int, ...] = ()) -> SamplingParams:
    """`sampling` with `part` instead of its own grammar. It starts after the tokens `after`, if there are any."""
    text = json.dumps({"type": "structural_tag", "format": part}, ensure_ascii=False)
    return structs.replace(sampling, json_schema=None, regex=None, ebnf=None, structural_tag=text, grammar_after=after)


def _json(text: str) -> Any:
    """The value of JSON text; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
