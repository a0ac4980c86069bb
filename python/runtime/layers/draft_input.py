"""The input layout of draft heads: how the embedding of a token and a hidden state are joined for the first projection."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from runtime.layers.norm import RMSNorm


class StreamStart(IntEnum):
    """The start of the head's residual stream."""

    PROJECTION = 0
    """The output of the first projection: joining gives no stream."""
    STATE = 1
    """The hidden state."""
    NORMED_STATE = 2
    """The normed hidden state, rounded to the model's dtype."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """The input layout of one head.

    Attributes:
        norms: the norms of embedding and hidden state; None if neither is normed.
        state_first: whether the columns of the hidden state come first.
        blank_start: whether the embedding of the token at position 0 is replaced by zeros.
        stream: the start of the residual stream.
    """

    norms: tuple[RMSNorm, RMSNorm] | None = None
    state_first: bool = False
    blank_start: bool = False
    stream: StreamStart = StreamStart.PROJECTION
