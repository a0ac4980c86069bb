"""The grammar compiler of a scheduler process."""

from __future__ import annotations

from pathlib import Path

from runtime.config.runtime_config import RuntimeConfig
from runtime.constrained.compiler import GrammarCompiler
from runtime.constrained.trial_process import TrialProcess
from runtime.entrypoints.grammar_process import GrammarBackendConfig
from runtime.models.config import ModelConfig
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_files import tokenizer_eos_ids


def eos_ids_of(tokenizer_path: str, model_config: ModelConfig) -> tuple[int, ...]:
    """The ids of the tokens that end a text, from the model's and the tokenizer's files."""
    # Only the loaded tokenizer knows the ids of tokens that tokenizer.json does not list as added ones.
    named = tokenizer_eos_ids(Path(tokenizer_path)) or (Tokenizer.load(tokenizer_path).eos_id,)
    known = (token for token in named if token is not None and token < model_config.vocab_size)
    return tuple(dict.fromkeys((*model_config.eos_ids, *known)))


def make_compiler(
    config: RuntimeConfig, model_config: ModelConfig, eos_ids: tuple[int, ...], tried: bool = False
) -> GrammarCompiler | None:
    """The configured grammar compiler, or None. It loads its tokenizer and library in its own thread.

    Args:
        config: names the backend and the tokenizer.
        model_config: gives the vocabulary size.
        eos_ids: from `eos_ids_of`.
        tried: another rank has already run the trials of the grammars, so this compiler needs no trial process.
    """
    name = config.scheduler.grammar_backend
    if name == "none":
        return None
    path, vocab_size = config.model.tokenizer_path, model_config.vocab_size
    backend = GrammarBackendConfig(name=name, tokenizer_path=path, eos_ids=eos_ids, vocab_size=vocab_size)
    return GrammarCompiler(backend.load, None if tried else TrialProcess(backend.command))
