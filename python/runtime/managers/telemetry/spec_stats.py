"""What became of the drafts: counted per request, and for the server."""

from __future__ import annotations

from runtime.managers.messages import SpecStats


class SpecTally:
    """Drafts verified and accepted, in all and by draft position.

    Attributes:
        paused_steps: of the server, steps that ran without drafts because so many decoded together. They are in no other figure here.
    """

    __slots__ = ("accepted_by_position", "accepted_tokens", "draft_tokens", "paused_steps", "verify_steps")

    def __init__(self) -> None:
        self.verify_steps = self.draft_tokens = self.accepted_tokens = self.paused_steps = 0
        self.accepted_by_position: list[int] = []

    def add(self, accept_len: int, draft_tokens: int, max_accept_len: int) -> None:
        """Count one verify step that committed `accept_len` tokens, the bonus included, of `draft_tokens` drafts."""
        if not self.accepted_by_position:
            self.accepted_by_position = [0] * (max_accept_len - 1)
        self.verify_steps += 1
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accept_len - 1
        for position in range(accept_len - 1):
            self.accepted_by_position[position] += 1

    def stats(self) -> SpecStats:
        """As a message."""
        return SpecStats(
            verify_steps=self.verify_steps,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            accepted_by_position=list(self.accepted_by_position),
        )
