"""How many drafts were accepted: counted per request, and for the server."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise, zip_longest
from typing import Literal

import msgspec

CONTEXTS = (0, 1024, 4096, 16384, 65536)
"""Acceptance is counted by context length: the lower bound of each class, in tokens."""
CLASS_NAMES = tuple(map(str, CONTEXTS))


def context_class(tokens: int) -> str:
    """The class of this context length, named by its lower bound."""
    return CLASS_NAMES[bisect_right(CONTEXTS, tokens) - 1]


class SpecStats(msgspec.Struct, array_like=True):
    """Verify steps and their drafts.

    Attributes:
        verify_steps: verify steps, counted per request.
        draft_tokens, accepted_tokens: drafts verified, and accepted.
        accepted_by_position: drafts accepted, by position in the window; empty before the first verify step.
        skipped_by_position: verify steps that were too shallow for the position; empty where none was.
    """

    verify_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = []
    skipped_by_position: list[int] = []

    def add(self, accept_len: int, draft_tokens: int, max_accept_len: int, depth: int | None = None, times: int = 1) -> None:
        """Count verify steps of `draft_tokens` drafts that committed `accept_len` tokens, bonus included.

        `depth`: K, where it is not `max_accept_len` - 1. `times`: how many such steps.
        """
        if not self.accepted_by_position:
            self.accepted_by_position = [0] * (max_accept_len - 1)
        self.verify_steps += times
        self.draft_tokens += draft_tokens * times
        if accept_len > 1:
            self.accepted_tokens += (accept_len - 1) * times
            accepted = self.accepted_by_position
            for position in range(accept_len - 1):
                accepted[position] += times
        if depth is not None and depth < max_accept_len - 1:
            self.skipped_by_position = self.skipped_by_position or [0] * (max_accept_len - 1)
            for position in range(depth, max_accept_len - 1):
                self.skipped_by_position[position] += times

    def plus(self, other: SpecStats, sign: Literal[1, -1] = 1) -> SpecStats:
        """The sum; with `sign` -1 the difference. An empty list counts as zeros."""

        def lists(own: list[int], others: list[int]) -> list[int]:
            return [a + sign * b for a, b in zip_longest(own, others, fillvalue=0)]

        return SpecStats(
            self.verify_steps + sign * other.verify_steps,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            lists(self.accepted_by_position, other.accepted_by_position),
            lists(self.skipped_by_position, other.skipped_by_position),
        )

    def since(self, earlier: SpecStats) -> SpecStats:
        """The difference to `earlier`, a copy of this one."""
        return self.plus(earlier, -1)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens that a verify step commits, bonus included; None before the first one.

        Source: `accept_len` of Li et al. 2024, arXiv:2401.15077.
        """
        return 1.0 + self.accepted_tokens / self.verify_steps if self.verify_steps else None

    @property
    def draft_positions(self) -> int:
        """The sum of the depths of all verify steps."""
        return self.verify_steps * len(self.accepted_by_position) - sum(self.skipped_by_position)

    @property
    def mean_depth(self) -> float | None:
        """Mean depth of a verify step; None before the first one."""
        return self.draft_positions / self.verify_steps if self.verify_steps else None

    @property
    def steps_by_accepted(self) -> list[int]:
        """Verify steps by the number of accepted drafts, from 0 on."""
        reached = [self.verify_steps, *self.accepted_by_position, 0]
        return [this - further for this, further in pairwise(reached)]

    @property
    def accept_rate(self) -> float | None:
        """Fraction of the verified drafts that was accepted; None before the first one."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def drafted_by_position(self) -> list[int]:
        """For each draft position, the number of verify steps at least that deep."""
        skipped = self.skipped_by_position or [0] * len(self.accepted_by_position)
        return [self.verify_steps - less for less in skipped]

    @property
    def accept_rate_by_position(self) -> list[float | None]:
        """For each draft position, the fraction of verify steps at least that deep that accepted it; None if there were none."""
        counts = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted if drafted else None for accepted, drafted in counts]


def no_drafts() -> dict[str, SpecStats]:
    """Counts of zero for each class of context lengths."""
    return {name: SpecStats() for name in CLASS_NAMES}
