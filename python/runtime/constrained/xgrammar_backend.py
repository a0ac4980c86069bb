"""Grammars by xgrammar: a pushdown automaton whose masks are mostly precomputed.

xgrammar loads torch, so this module is imported in the scheduler process only, and only if it was asked for.

Source: https://github.com/mlc-ai/xgrammar
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import xgrammar

from runtime.constrained.grammar import MaskRow, Matcher, Vocabulary, mask_words
from runtime.constrained.json_schema import load_json_schema
from runtime.constrained.structural_tag import parse_structural_tag
from runtime.errors import GrammarError
from runtime.sampling_params import GrammarSpec

MAX_WHITESPACE = 32
"""White space between the parts of JSON; bounded, so that a model cannot repeat it without end."""


class XgrammarBackend:
    """Compiles grammars for one tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [vocabulary.token_bytes(token) for token in range(vocabulary.vocab_size)]
        for token in (*vocabulary.special.values(), *vocabulary.eos_ids):
            tokens[token] = b""
        info = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.vocab_size, stop_token_ids=list(vocabulary.eos_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words = mask_words(vocabulary.vocab_size)

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        """A grammar as xgrammar takes it; see `GrammarBackend`."""
        if spec.kind == "json_schema":
            load_json_schema(spec.text)  # for its errors
        if spec.kind != "structural_tag":
            return spec
        return GrammarSpec(spec.kind, msgspec.json.encode({"type": "structural_tag", "format": parse_structural_tag(spec.text)}).decode())

    def compile(self, translated: GrammarSpec) -> Matcher:
        """Compile a grammar; see `GrammarBackend`."""
        try:
            matcher = XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled(translated)))
        except (RuntimeError, ValueError) as error:  # xgrammar raises what its C++ code raises
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise GrammarError(translated.kind, _sentence(str(error))) from error
        row = np.zeros(self._words, dtype=np.int32)
        matcher.fill(row)
        if not row.any():
            raise GrammarError(translated.kind, "No text matches it.")
        return matcher

    def _compiled(self, translated: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, translated.text
        if translated.kind == "json_schema":
            return compiler.compile_json_schema(text, any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE)
        if translated.kind == "regex":
            return compiler.compile_regex(text)
        if translated.kind == "ebnf":
            return compiler.compile_grammar(text)
        return compiler.compile_structural_tag(text)


def _sentence(reason: str) -> str:
    """xgrammar's message as a short sentence, without time and place in its source."""
    text = re.sub(r"^\[[0-9:]+\] \S+:[0-9]+: ", "", reason.split("Check failed:")[-1].strip())
    text = " ".join(text.split())[:300]
    return text if text.endswith(".") else f"{text}."


class XgrammarMatcher:
    """The state of one text in its grammar; see `Matcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        return self._matcher.accept_token(token)

    def fork(self) -> Matcher:
        """See `Matcher`."""
        return XgrammarMatcher(self._matcher.fork())

    def fill(self, row: MaskRow) -> str:
        """See `Matcher`."""
        if not self._matcher.fill_next_token_bitmask(row[None]):
            row.fill(-1)  # xgrammar writes nothing if all tokens are allowed
        return ""
