"""The properties of the tokenizer and the model that grammar backends need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of the tokenizer and the model that a backend needs.

    Attributes:
        definition: the text of tokenizer.json.
        vocab_size: ids of the model, at least as many as the definition has.
        eos_ids: tokens that end a text, at least one, all of them tokens of the tokenizer.
        special: the ids of control tokens by their text. Free text never contains a control token.
        token_bytes: the bytes of a token; empty for a control token or an unknown id.
    """

    definition: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    special: dict[str, int]
    token_bytes: Callable[[int], bytes]
