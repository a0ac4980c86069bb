"""How a draft head joins the embedding of a token and a hidden state into the row that its first projection reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from runtime.layers.norm import RMSNorm


class StreamStart(IntEnum):
    """What the head's residual stream begins with."""

    PROJECTION = 0
    """What follows the first projection: joining gives no stream."""
    STATE = 1
    """The hidden state."""
    NORMED_STATE = 2
    """The normed hidden state, rounded to the model's dtype."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """The layout of one head.

    Attributes:
        norms: of the embedding, and of the hidden state; None if neither is normed.
        state_first: whether the columns of the hidden state come first.
        blank_start: whether the embedding of the token at position 0 is zeros.
        stream: what the residual stream begins with.
    """

    norms: tuple[RMSNorm, RMSNorm] | None = None
    state_first: bool = False
    blank_start: bool = False
    stream: StreamStart = StreamStart.PROJECTION
