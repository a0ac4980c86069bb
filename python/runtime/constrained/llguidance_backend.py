"""Grammars by llguidance: an Earley parser over a lazily built lexer, whose masks take microseconds.

Source: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import ctypes
import json
import re

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from runtime.constrained.grammar import MaskRow, Matcher, Vocabulary, allowed_tokens, mask_words, only_token
from runtime.constrained.json_schema import load_for_llguidance
from runtime.constrained.structural_tag import LarkWriter, parse_structural_tag
from runtime.errors import GrammarError
from runtime.sampling_params import GrammarSpec

WHITESPACE = r"[ \n\r\t]{0,32}"
"""White space between the parts of JSON; bounded, so that a model cannot repeat it without end."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=100_000, max_grammar_size=25_000, verbose_errors=False
)
"""Up to 0.3 s for the slowest mask; a grammar that needs more is refused, or ends its request."""


class LlguidanceBackend:
    """Compiles grammars for one tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        size, eos_ids = vocabulary.vocab_size, vocabulary.eos_ids
        self._tokenizer = LLTokenizer(vocabulary.definition, n_vocab=size, eos_token=list(eos_ids))
        self._control = ControlText(self._tokenizer)
        self._words, self._eos_ids, self._special = mask_words(size), frozenset(eos_ids), vocabulary.special

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        """A grammar in llguidance's own form; see `GrammarBackend`."""
        return GrammarSpec(spec.kind, self._source(spec))

    def compile(self, translated: GrammarSpec) -> Matcher:
        """Compile a grammar; see `GrammarBackend`."""
        matcher, kind = LLMatcher(self._tokenizer, translated.text, log_level=0, limits=LIMITS), translated.kind
        made = LlguidanceMatcher(matcher, self._control)
        # The first mask also builds the states that all matchers begin with.
        row = np.zeros(self._words, dtype=np.int32)
        if reason := matcher.get_error() or made.fill(row):
            raise GrammarError(kind, "No text matches it." if reason.startswith("NoExtension") else _sentence(reason))
        begins = [token for token in np.flatnonzero(allowed_tokens(row)).tolist() if token not in self._eos_ids][:1]
        probe = matcher.deep_copy()
        if probe.try_consume_tokens(begins) < len(begins):
            reason = probe.get_error()
            raise GrammarError(kind, "No text matches it, or it is too complex" + (f": {_sentence(reason)}" if reason else "."))
        return made

    def _source(self, spec: GrammarSpec) -> str:
        if spec.kind == "json_schema":
            return _json_grammar(json.dumps(load_for_llguidance(spec.text)))
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(unanchored(spec.text))
        if spec.kind == "structural_tag":
            return LarkWriter(self._special, WHITESPACE, _lark).grammar(parse_structural_tag(spec.text))
        return _lark(spec.text)


class ControlText:
    """Splits the text of control tokens into ordinary tokens where a grammar allows no other text.

    llguidance splits such text as the tokenizer does, which reads the text of a control token as that token, even in a string. The grammar
    then rejects the only token that its mask allows, or the text ends early at an end-of-text token.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        bits = np.zeros(mask_words(tokenizer.vocab_size), dtype=np.uint32)
        # More than `Vocabulary.special`: to llguidance, tags such as <think> are control tokens too.
        for token in filter(tokenizer.is_special_token, range(tokenizer.vocab_size)):
            bits[token // 32] |= np.uint32(1 << token % 32)
        self._tokenizer, self._words = tokenizer, np.flatnonzero(bits)
        self._bits = bits[self._words].view(np.int32)

    def split(self, matcher: LLMatcher, row: MaskRow) -> None:
        """Replace a control token that `row` allows alone by an ordinary token, unless the grammar names it or the text ends."""
        if not (row[self._words] & self._bits).any() or only_token(row) is None:
            return
        forced = matcher.compute_ff_bytes().split(b"\xff")[0]  # 0xff begins a control token that the grammar names
        if ids := self._tokenizer.greedy_tokenize(forced.decode(errors="ignore")):
            row.fill(0)
            row.view(np.uint32)[ids[0] // 32] = 1 << ids[0] % 32


class LlguidanceMatcher:
    """The state of one text in its grammar; see `Matcher`.

    Drafts are pushed on a fork, not rolled back: after `rollback` past a state whose mask was computed, llguidance 1.9.1 computes
    different masks.
    """

    def __init__(self, matcher: LLMatcher, control: ControlText) -> None:
        self._matcher, self._control = matcher, control

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        return self._matcher.try_consume_tokens([token]) == 1

    def fork(self) -> Matcher:
        """See `Matcher`. Takes 1 us, and 2 us more per 100 tokens."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._control)

    def fill(self, row: MaskRow) -> str:
        """See `Matcher`."""
        address = ctypes.addressof(ctypes.c_byte.from_buffer(row.data))  # 0.2 us; `row.ctypes.data` takes 3
        self._matcher.unsafe_compute_mask_ptr(address, row.nbytes)
        if self._matcher.is_error():
            return self._matcher.get_error()
        self._control.split(self._matcher, row)
        return ""


def _json_grammar(schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:  # NaN, a number above those of float64, or half a surrogate pair, which Python's parser accepts
        raise GrammarError("json_schema", f"It is not JSON: {error}.") from error


def _lark(ebnf: str) -> str:
    """A grammar in GBNF or Lark, as Lark."""
    try:
        return grammar_from("grammar", ebnf)
    except Exception as error:  # the converter raises what its parser raises
        too_deep = "maximum recursion depth" in str(error)
        raise GrammarError("ebnf", "It is nested too deeply." if too_deep else _sentence(str(error))) from error


def unanchored(regex: str) -> str:
    """`regex` without anchors at its ends: a grammar always covers the whole text."""
    begin = 1 if regex.startswith("^") else 0
    escaped = len(re.findall(r"(\\*)\$$", regex)[0]) % 2 if regex.endswith("$") else 1
    return regex[begin : len(regex) - (0 if escaped else 1)]


def _sentence(reason: str) -> str:
    """llguidance's message as a short sentence, without positions in the grammar that was generated for it."""
    if reference := re.search(r"Resource '(.*?)' is not present in a registry", reason):
        return f"It refers to {reference[1].removeprefix('json-schema:///')[:100]!r}; only references inside the schema are supported."
    text = re.split(r"\n<|; following special tokens|\n +[0-9]+ \| ", reason)[0]
    text = " ".join(re.sub(r"^(at )?[0-9]+\([0-9]+\): (failed to compile JSON schema: )?", "", text).split())[:300]
    return text if text.endswith(".") else f'{text} "".' if text.endswith(":") else f"{text}."
