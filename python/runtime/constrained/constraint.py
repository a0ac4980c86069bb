"""The constraint of one request: optional free text, then text that follows its grammar, then the end."""

from __future__ import annotations

from time import perf_counter, thread_time

from runtime.constrained.grammar import MaskRow, Matcher

SLOW = 0.01
"""Wall-clock seconds of a mask after which the request's masks are metered; a busy machine may also exceed this."""
SPARE = 0.5
"""CPU seconds that all metered masks of a request may take in addition to `PER_MASK` each."""
PER_MASK = 0.01
"""CPU seconds that a metered mask may take without using up `SPARE`."""


class MaskMeter:
    """Bounds the time that the masks of one request take, because all requests of a batch wait for them.

    Reading the clock takes less time than reading a thread's CPU time, so it comes first.

    Attributes:
        exceeded: whether the masks took too long. It does not change the masks: ranks must not diverge because of their speed.
    """

    def __init__(self) -> None:
        self._metered, self._left, self.exceeded = False, SPARE, False

    def start(self) -> float:
        """Begin to time a mask; returns the argument of `stop`."""
        return thread_time() if self._metered else perf_counter()

    def stop(self, began: float) -> float:
        """End the timing of a mask; returns the CPU seconds that it took beyond `PER_MASK`, 0 if it was not metered."""
        if self._metered:
            return thread_time() - began - PER_MASK
        self._metered = perf_counter() - began > SLOW
        return 0.0

    def charge(self, seconds: float) -> None:
        """Count time that masks took beyond `PER_MASK`."""
        self._left -= seconds
        self.exceeded = self.exceeded or self._left < 0


class Constraint:
    """Restricts the next token of one request.

    Args:
        matcher: the state of the text in its grammar.
        eos_ids: tokens that end the text.
        after: consecutive tokens after which the grammar applies; the text before them is free.

    Attributes:
        restricts: whether the next token is restricted: the free text has ended and the grammar's text has not.
        ended: whether the text has ended; later tokens have no meaning.
        error: that a token was committed which the grammar does not allow; empty otherwise.
        meter: bounds the time of its masks.
    """

    def __init__(self, matcher: Matcher, eos_ids: frozenset[int], after: tuple[int, ...] = ()) -> None:
        self._matcher, self._eos_ids, self._after = matcher, eos_ids, after
        self._latest: tuple[int, ...] = ()
        self.meter = MaskMeter()
        self.restricts, self.ended, self.error = not after, False, ""

    def fork(self) -> Constraint:
        """An independent constraint in the same state, for drafts."""
        fork = Constraint(self._matcher if self.ended else self._matcher.fork(), self._eos_ids, self._after)
        fork._latest, fork.restricts, fork.ended = self._latest, self.restricts, self.ended
        return fork

    def push(self, token: int) -> None:
        """Advance by one token. A token that is not allowed ends the text."""
        if self.restricts:
            if token in self._eos_ids or not self._matcher.push(token):
                self.restricts, self.ended = False, True
        elif not self.ended:
            self._latest = (*self._latest, token)[-len(self._after) :]
            self.restricts = self._latest == self._after

    def commit(self, token: int) -> None:
        """Advance by one committed token."""
        was_over = self.ended
        self.push(token)
        if self.ended and not was_over and token not in self._eos_ids:
            self.error = self.error or f"Token {token} was chosen, which the grammar does not allow."

    def fill(self, row: MaskRow) -> str:
        """As `Matcher.fill`; call it while `restricts`."""
        reason = self._matcher.fill(row)
        if reason:  # a request that commits a token here ends; until then any row is valid
            row.fill(-1)
        return reason
