"""The grammar compiler of a scheduler process."""

from __future__ import annotations

from pathlib import Path

from runtime.config.runtime_config import RuntimeConfig
from runtime.constrained.backends import Vocabulary, make_backend
from runtime.constrained.compiler import GrammarCompiler
from runtime.text.tokenizer import Tokenizer


def make_compiler(config: RuntimeConfig, eos_ids: tuple[int, ...], vocab_size: int) -> GrammarCompiler | None:
    """The compiler that the configuration asks for, or None. Its tokenizer and library are loaded in a thread of it."""
    name = config.scheduler.grammar_backend
    if name == "none":
        return None
    folder = Path(config.model.tokenizer_path)
    return GrammarCompiler(lambda: make_backend(name, vocabulary_of(Tokenizer.load(folder), eos_ids, vocab_size)))


def vocabulary_of(tokenizer: Tokenizer, eos_ids: tuple[int, ...], vocab_size: int) -> Vocabulary:
    """What grammar backends must know of a tokenizer, for a model of `vocab_size` ids."""
    return Vocabulary(tokenizer.definition, vocab_size, eos_ids, tokenizer.special_tokens, tokenizer.token_bytes)
