"""The capacity of the queue: limits open requests and their prompt tokens, by client."""

from __future__ import annotations

from collections import Counter

from runtime.errors import QueuedTokensFull, QueueFull
from runtime.managers.cost import CallCost, CostLimits


class QueueCapacity:
    """Counts open requests and their prompt tokens, and refuses calls beyond the limits.

    A client that holds less than an equal share of the queue may add requests even if other clients have filled it, up to twice the limit:
    a flood from one client does not shut out another.

    Args:
        running: requests that run together.
        queued: requests that may wait.
        running_tokens: prompt tokens that run together.
        queued_tokens: prompt tokens that may wait.
    """

    def __init__(self, running: int, queued: int, running_tokens: int, queued_tokens: int) -> None:
        self._running, self._queued = running, queued
        self._running_tokens, self._queued_tokens = running_tokens, queued_tokens
        self._samples: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def limits(self, logprob_cells: int) -> CostLimits:
        """The limits of one call."""
        return CostLimits(self._queued_tokens, logprob_cells, self._running + self._queued)

    def check(self, client: str, cost: CallCost) -> None:
        """Raise `QueueFull` or `QueuedTokensFull` if a call does not fit now."""
        if not _fits(self._samples, client, cost.samples, self._running, self._queued):
            raise QueueFull(self._queued)
        if not _fits(self._tokens, client, cost.prompt_tokens, self._running_tokens, self._queued_tokens):
            raise QueuedTokensFull(self._queued_tokens)

    def add(self, client: str, samples: int, tokens: int) -> None:
        """Count samples that were sent; negative numbers for samples that ended."""
        for counter, amount in ((self._samples, samples), (self._tokens, tokens)):
            counter[client] += amount
            if not counter[client]:
                del counter[client]


def _fits(held: Counter[str], client: str, more: int, running: int, queued: int) -> bool:
    total = held.total() + more
    if total <= running + queued:
        return True
    clients = len(held.keys() | {client})
    share = (running + queued) // clients
    return held[client] + more <= share and total <= running + 2 * queued
