"""The constraint of one request: free text first where that was asked for, then its grammar, then the end of the text."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.constrained.grammar import Grammar, MaskRow


class Constraint:
    """What the next token of one request may be. Tokens are pushed as they are chosen, and popped where drafts are rejected.

    Args:
        grammar: what the text follows.
        eos_ids: tokens that end it.
        after: tokens whose appearance, one after the other, starts the grammar; the text before them is free.

    Attributes:
        error: why the grammar could not be followed to its end; empty where all is well.
    """

    def __init__(self, grammar: Grammar, eos_ids: frozenset[int], after: Sequence[int] = ()) -> None:
        self._matcher = grammar.matcher()
        self._eos_ids, self._after = eos_ids, list(after)
        self._free: list[int] = []
        self._matched = self._past_end = 0
        self.error = ""

    @property
    def started(self) -> bool:
        """Whether the free text is over."""
        return not self._after or self._free[-len(self._after) :] == self._after

    @property
    def ended(self) -> bool:
        """Whether the text is over: what follows has no meaning."""
        return self._past_end > 0

    @property
    def restricts(self) -> bool:
        """Whether the next token is restricted."""
        return self.started and not self.ended

    def push(self, token: int) -> None:
        """Go on by one token."""
        if not self.started:
            self._free.append(token)
        elif self.ended or token in self._eos_ids or not self._matcher.push(token):
            self._past_end += 1
        else:
            self._matched += 1

    def commit(self, token: int) -> None:
        """Go on by one token that is part of the text for good."""
        was_over = self.ended
        self.push(token)
        if self.ended and not was_over and token not in self._eos_ids:
            self.error = self.error or f"Token {token} was chosen, which the grammar does not allow."

    def pop(self, count: int) -> None:
        """Take the last `count` tokens back."""
        past_end = min(count, self._past_end)
        matched = min(count - past_end, self._matched)
        free = count - past_end - matched
        self._past_end -= past_end
        self._matched -= matched
        if matched:
            self._matcher.pop(matched)
        if free:
            del self._free[-free:]

    def fill(self, row: MaskRow) -> None:
        """Write which tokens may come next; call it while `restricts`."""
        self.error = self.error or self._matcher.fill(row)
        if self.error:  # the request ends with this error; until then any valid row will do
            row.fill(-1)
