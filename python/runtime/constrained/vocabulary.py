"""What a grammar backend must know of the tokenizer and the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
