"""The waiting requests: one queue per client; the client that was served least comes first."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field

from runtime.managers import schedule_policy as policy
from runtime.managers.req import Req

Order = Callable[[Sequence[Req]], Sequence[Req]]

MAX_REMEMBERED = 4096
"""Number of clients without waiting requests whose virtual time is kept: those that were served most. It may double between two
cleanups."""


@dataclass(slots=True)
class _ClientQueue:
    """The waiting requests of one client, sorted by `policy.queue_key`; `start` is the virtual time at which the next one starts."""

    start: float
    reqs: list[Req] = field(default_factory=list)


class FairQueue:
    """Start-time fair queueing by client (Goyal et al. 1996, doi:10.1145/248156.248171).

    The cost of a request is its maximum length in tokens. A client that was idle starts at the current virtual time, so it neither saves up
    time nor waits behind the queue of another. Requests that were retracted because KV memory was full come first, then those with a higher
    `Req.shared_priority`.

    Attributes:
        tokens: tokens of the waiting requests, including any that the prefix cache has.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _ClientQueue] = {}
        self._finished: dict[str, float] = {}  # where clients without waiting requests continue
        self._forget_above = 0
        self._time = 0.0
        self._size = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Req]:
        return self.ordered(lambda reqs: reqs)

    def add(self, req: Req) -> None:
        """Add a waiting request."""
        client = req.request.client
        if client not in self._queues:
            self._queues[client] = _ClientQueue(max(self._time, self._finished.pop(client, 0.0)))
        insort(self._queues[client].reqs, req, key=policy.queue_key)
        self._size += 1
        self.tokens += req.length

    def remove(self, req: Req) -> None:
        """Remove a request that ended."""
        client = req.request.client
        queue = self._queues[client]
        queue.reqs.remove(req)
        self._size -= 1
        self.tokens -= req.length
        if not queue.reqs:
            del self._queues[client]
            self._finished[client] = queue.start
            if len(self._finished) > self._forget_above:
                self._forget()

    def admit(self, req: Req) -> None:
        """Remove a request that runs now, and charge its client; a retracted request was charged before."""
        queue = self._queues[req.request.client]
        if not req.was_admitted:
            self._time = max(self._time, queue.start)
            queue.start += req.total_limit
        self.remove(req)

    @property
    def remembered(self) -> int:
        """Number of clients without waiting requests whose virtual time is kept."""
        return len(self._finished)

    @property
    def clients(self) -> KeysView[str]:
        """The clients with waiting requests."""
        return self._queues.keys()

    def heads(self) -> list[Req]:
        """The first request of each client, in the order of admission."""
        heads = [queue.reqs[0] for queue in self._queues.values()]
        return sorted(heads, key=lambda req: _key(req, self._queues[req.request.client].start))

    def precedes(self, req: Req, client: str) -> bool:
        """Whether the client of the waiting `req` was served less than `client`, which has running requests."""
        queue = self._queues.get(client)
        return self._queues[req.request.client].start < (queue.start if queue is not None else self._finished.get(client, 0.0))

    def ordered(self, order: Order) -> Iterator[Req]:
        """The order of admission; `order` arranges the requests of one client."""

        def keyed(queue: _ClientQueue) -> Iterator[tuple[tuple[bool, int, float, int], Req]]:
            start = queue.start
            for req in list(order(queue.reqs)):
                yield _key(req, start), req
                start += req.total_limit

        return (req for _, req in heapq.merge(*map(keyed, self._queues.values())))

    def _forget(self) -> None:
        """Forget the clients whose virtual time has passed, and of the others those that were served least.

        This runs again when the number of kept clients has doubled, so its cost per request does not grow with the number of clients.
        """
        ahead = ((end, name) for name, end in self._finished.items() if end > self._time)
        self._finished = {name: end for end, name in heapq.nlargest(MAX_REMEMBERED, ahead)}
        self._forget_above = 2 * len(self._finished)


def _key(req: Req, start: float) -> tuple[bool, int, float, int]:
    return (not req.retracted or req.retracted_for_fairness, -req.shared_priority, start, req.seq)
