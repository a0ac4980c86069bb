"""How a prompt is pooled, for requests that return numbers instead of text."""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.sampling_params import check_token_ids

MAX_LABELS = 1024

PoolingName = Literal["mean", "last"]
"""How hidden states become an embedding: their mean over the prompt, or the state of the last token."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a request that returns numbers and generates no text.

    Attributes:
        kind: `mean` and `last` give hidden states after the final norm, float32 [hidden]; `labels` gives
            log-probabilities of the next token, one per label.
        label_ids: the tokens whose log-probabilities `labels` returns.
    """

    kind: PoolingName | Literal["labels"]
    label_ids: tuple[int, ...] = ()

    @property
    def whole_prompt(self) -> bool:
        """Whether states of all prompt tokens are needed, so that no cached prefix can be reused."""
        return self.kind == "mean"

    def check(self, vocab_size: int) -> None:
        """Raise `UnknownToken` for a label outside the vocabulary."""
        check_token_ids("label_token_ids", self.label_ids, vocab_size)
