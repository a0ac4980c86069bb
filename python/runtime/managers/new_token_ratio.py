"""The estimate of how far running requests will grow."""

from __future__ import annotations

from runtime.batch import WorkerLimits
from runtime.managers.req import Req

MAX_RESERVED_TOKENS = 4096
"""Limit on the output tokens that are reserved for one request: few requests generate more."""
INITIAL_RATIO = 0.7
"""The ratio at start and after a retraction, at conservativeness 1."""
FINAL_SHARE = 0.2
"""The ratio falls to this fraction of the initial one while no request is retracted."""
DECAY_STEPS = 600
"""Decode steps from the initial to the final ratio."""


class NewTokenRatio:
    """The fraction of the remaining output of running requests for which KV slots are kept free.

    The ratio starts at 0.7 * conservativeness (at most 1), falls with each decode step, and returns to its start when a
    request is retracted.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(1.0, INITIAL_RATIO * conservativeness)
        self.value = self._initial

    def decay(self) -> None:
        """Lower the ratio after a decode step without a retraction."""
        final = self._initial * FINAL_SHARE
        self.value = max(final, self.value - (self._initial - final) / DECAY_STEPS)

    def reset(self) -> None:
        """Return to the initial ratio after a retraction."""
        self.value = self._initial

    def slots(self, req: Req, limits: WorkerLimits) -> int:
        """KV slots that `req` is expected to need, including those that a decode step writes in advance while another is in flight."""
        ahead = limits.tokens_per_step + (limits.max_accept_len if limits.overlap else 0)
        return req.length + int(min(req.remaining, MAX_RESERVED_TOKENS) * self.value) + ahead
