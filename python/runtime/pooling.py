"""What a prompt is reduced to, for requests that want numbers instead of text."""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.errors import InvalidField
from runtime.sampling_params import check_token

MAX_LABELS = 1024

PoolingName = Literal["mean", "last"]
"""How hidden states become an embedding: their mean over the prompt, or the state of the last token."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """A request for numbers: no text is generated.

    Attributes:
        kind: `mean` and `last` give hidden states after the final norm, float32 [hidden]; `labels` gives
            log-probabilities of the next token, one per label.
        label_ids: the tokens that `labels` asks for.
    """

    kind: PoolingName | Literal["labels"]
    label_ids: tuple[int, ...] = ()

    @property
    def whole_prompt(self) -> bool:
        """Whether states of all prompt tokens are needed, so that no cached prefix can be reused."""
        return self.kind == "mean"

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidField` for labels that are missing, too many or outside the vocabulary."""
        if self.kind == "labels" and not 1 <= len(self.label_ids) <= MAX_LABELS:
            raise InvalidField("label_token_ids", self.label_ids, f"an array of 1 to {MAX_LABELS} token ids")
        for token in self.label_ids:
            check_token("label_token_ids", token, vocab_size)
