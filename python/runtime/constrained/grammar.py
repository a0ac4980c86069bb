"""The interface of matchers and of the backends that compile them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from runtime.sampling_params import GrammarSpec

MaskRow = npt.NDArray[np.int32]
"""int32 [ceil(V / 32)]: bit v % 32 of entry v // 32 says whether token v is allowed."""


def mask_words(vocab_size: int) -> int:
    """Entries of a mask row."""
    return -(-vocab_size // 32)


def allowed_tokens(row: MaskRow) -> npt.NDArray[np.bool_]:
    """A mask row as bool [32 * ceil(V / 32)]."""
    return np.unpackbits(row.view(np.uint8), bitorder="little").astype(np.bool_)


def only_token(row: MaskRow) -> int | None:
    """The only token that a mask row allows; None if it allows several."""
    counts = np.bitwise_count(row.view(np.uint32))
    if counts.sum() != 1:
        return None
    word = int(counts.argmax())
    return word * 32 + int(row.view(np.uint32)[word]).bit_length() - 1


class GrammarFailure(NamedTuple):
    """Why a request ends whose grammar cannot be followed.

    Attributes:
        valid: how many of the tokens that it committed in the step follow the grammar.
        reason: a sentence.
    """

    valid: int
    reason: str


class Matcher(Protocol):
    """The state of one text in its grammar. End-of-text ids are never pushed."""

    def push(self, token: int) -> bool:
        """Advance by one token. Return False, without a change of state, if the grammar does not allow it."""
        ...

    def fork(self) -> Matcher:
        """An independent matcher in the same state."""
        ...

    def fill(self, row: MaskRow) -> str:
        """Write which tokens may come next: end-of-text ids if the text may end, and only those if it must.

        Returns:
            Why the matcher cannot continue, and then `row` has no meaning; otherwise an empty text.
        """
        ...


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


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer. Thread-safe."""

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        """Convert a grammar to the form that `compile` takes. This is Python code, so it blocks other threads.

        Raises:
            GrammarError: the text is not a grammar, or only endless texts match it.
        """
        ...

    def compile(self, translated: GrammarSpec) -> Matcher:
        """Return a matcher at the beginning of a text; each text uses a fork of it. This is native code, so other threads run.

        Raises:
            GrammarError: the text is not a grammar, it is too large, or no text matches it.
        """
        ...
