"""The main program of the process that runs grammar trials for its parent, a scheduler; it ends with its parent."""

from __future__ import annotations

import json
import logging
import os
import sys
from multiprocessing.connection import Connection

import msgspec
import setproctitle

from runtime.constrained.backends import make_backend
from runtime.constrained.grammar import GrammarBackend, Vocabulary
from runtime.constrained.trial import GrammarTrial
from runtime.entrypoints.kept_memory import freeze_gc, give_back_memory
from runtime.errors import ConfigError
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class GrammarBackendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar backend and the inputs of its `Vocabulary`; passed to the process as a JSON argument."""

    name: str
    tokenizer_path: str
    eos_ids: tuple[int, ...]
    vocab_size: int

    @property
    def command(self) -> list[str]:
        """The command that starts the process."""
        return [sys.executable, "-m", "runtime.entrypoints.grammar_process", msgspec.json.encode(self).decode()]

    def load(self) -> GrammarBackend:
        """Load the tokenizer and the library, which may take seconds.

        Raises:
            ConfigError: there is no tokenizer, or it has none of the end-of-text tokens.
        """
        tokenizer = Tokenizer.load(self.tokenizer_path)
        vocabulary = vocabulary_of(tokenizer, self.eos_ids, self.vocab_size)
        unknown = [token for token in self.eos_ids if token not in vocabulary.eos_ids]
        if not vocabulary.eos_ids:
            raise ConfigError(f"the tokenizer in {self.tokenizer_path} has none of the model's end-of-text ids {unknown}")
        if unknown:
            log.info("grammars never end a text with the end-of-text ids %s, which the tokenizer does not have", unknown)
        return make_backend(self.name, vocabulary)


def vocabulary_of(tokenizer: Tokenizer, eos_ids: tuple[int, ...], vocab_size: int) -> Vocabulary:
    """What grammar backends need from a tokenizer, for a model with `vocab_size` token ids.

    Leaves out unknown `eos_ids`, and added tokens that the model lacks, such as a padding token that was added to train it.
    """
    known, definition = tuple(filter(tokenizer.has_id, eos_ids)), tokenizer.definition
    if tokenizer.vocab_size > vocab_size:
        fields = json.loads(definition)
        definition = json.dumps({**fields, "added_tokens": [token for token in fields["added_tokens"] if token["id"] < vocab_size]})
    special = {text: token for text, token in tokenizer.special_tokens.items() if token < vocab_size}
    return Vocabulary(definition, vocab_size, known, special, tokenizer.token_bytes)


def main(argument: str) -> None:
    """`python -m runtime.entrypoints.grammar_process CONFIG`, with a socket as the standard input."""
    config = msgspec.json.decode(argument, type=GrammarBackendConfig)
    setproctitle.setproctitle("talon::grammars")
    connection = Connection(os.dup(0))
    try:
        backend = config.load()
    except ConfigError:
        sys.exit(1)  # the parent loads the same files and reports the error
    freeze_gc()
    give_back_memory()
    GrammarTrial(backend, config.vocab_size, config.eos_ids).serve(connection)


if __name__ == "__main__":
    main(sys.argv[1])
