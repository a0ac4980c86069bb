"""The grammar compiler of a scheduler process."""

from __future__ import annotations

from pathlib import Path

from runtime.config.runtime_config import RuntimeConfig
from runtime.constrained.backends import Vocabulary, make_backend
from runtime.constrained.compiler import GrammarCompiler
from runtime.models.config import ModelConfig
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_files import tokenizer_eos_ids


def eos_ids_of(config: RuntimeConfig, model_config: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a text, from the model's and the tokenizer's files."""
    named = tokenizer_eos_ids(Path(config.model.tokenizer_path))
    return tuple(dict.fromkeys((*model_config.eos_ids, *named)))


def make_compiler(config: RuntimeConfig, model_config: ModelConfig) -> GrammarCompiler | None:
    """The compiler that the configuration asks for, or None. Its tokenizer and library are loaded in a thread of it."""
    name, folder = config.scheduler.grammar_backend, Path(config.model.tokenizer_path)
    if name == "none":
        return None
    eos_ids, size = eos_ids_of(config, model_config), model_config.vocab_size
    return GrammarCompiler(lambda: make_backend(name, vocabulary_of(Tokenizer.load(folder), eos_ids, size)))


def vocabulary_of(tokenizer: Tokenizer, eos_ids: tuple[int, ...], vocab_size: int) -> Vocabulary:
    """What grammar backends must know of a tokenizer, for a model of `vocab_size` ids."""
    return Vocabulary(tokenizer.definition, vocab_size, eos_ids, tokenizer.special_tokens, tokenizer.token_bytes)
