"""The grammar backends by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.constrained.grammar import GrammarBackend


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a backend must know of the tokenizer and the model.

    Attributes:
        definition: the text of tokenizer.json.
        vocab_size: ids of the model, at least as many as the tokenizer has.
        eos_ids: tokens that end a text.
        special: the spelling of each control token, and its id. Text never spells one.
        token_bytes: the bytes of a token; empty for a control token or an unknown id.
    """

    definition: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    special: dict[str, int]
    token_bytes: Callable[[int], bytes]


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """The backend called `name`. Imports its library, which may take seconds."""
    if name == "xgrammar":
        from runtime.constrained.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(vocabulary)
    from runtime.constrained.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(vocabulary)
