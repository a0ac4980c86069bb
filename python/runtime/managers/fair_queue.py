"""The waiting requests: each client has a lane, and the client that was served least comes first."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field

from runtime.managers import schedule_policy as policy
from runtime.managers.req import Req

Order = Callable[[Sequence[Req]], Sequence[Req]]

MAX_REMEMBERED = 4096
"""Clients without waiting requests whose share is remembered: those that were given most. Twice as many for a while."""


@dataclass(slots=True)
class _Lane:
    """The waiting requests of one client, sorted by `policy.queue_key`; `start` is the virtual time of its next one."""

    start: float
    reqs: list[Req] = field(default_factory=list)


class FairQueue:
    """Start-time fair queueing by client (Goyal et al. 1996, doi:10.1145/248156.248171).

    A request costs its longest possible length in tokens. A client that was idle starts at the current virtual time, so it
    neither saves up time nor waits behind the queue of another. Requests that were retracted for want of memory come first,
    then higher priorities, as far as they count between clients.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._finished: dict[str, float] = {}  # where clients without waiting requests continue
        self._forget_above = 0
        self._time = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Req]:
        return self.ordered(lambda reqs: reqs)

    def add(self, req: Req) -> None:
        """Let `req` wait."""
        client = req.request.client
        if client not in self._lanes:
            self._lanes[client] = _Lane(max(self._time, self._finished.pop(client, 0.0)))
        insort(self._lanes[client].reqs, req, key=policy.queue_key)
        self._size += 1

    def remove(self, req: Req) -> None:
        """Take out a request that ended."""
        client = req.request.client
        lane = self._lanes[client]
        lane.reqs.remove(req)
        self._size -= 1
        if not lane.reqs:
            del self._lanes[client]
            self._finished[client] = lane.start
            if len(self._finished) > self._forget_above:
                self._forget()

    def admit(self, req: Req) -> None:
        """Take out a request that runs now, and charge its client; a retracted one was charged before."""
        lane = self._lanes[req.request.client]
        if not req.was_admitted:
            self._time = max(self._time, lane.start)
            lane.start += req.total_limit
        self.remove(req)

    @property
    def remembered(self) -> int:
        """Clients without waiting requests that continue where they were."""
        return len(self._finished)

    @property
    def clients(self) -> KeysView[str]:
        """The clients that wait."""
        return self._lanes.keys()

    def heads(self) -> list[Req]:
        """The first request of each client, in turn."""
        heads = [lane.reqs[0] for lane in self._lanes.values()]
        return sorted(heads, key=lambda req: _key(req, self._lanes[req.request.client].start))

    def precedes(self, req: Req, client: str) -> bool:
        """Whether the waiting `req` was given less than another client, which has requests that run."""
        lane = self._lanes.get(client)
        return self._lanes[req.request.client].start < (lane.start if lane is not None else self._finished.get(client, 0.0))

    def ordered(self, order: Order) -> Iterator[Req]:
        """The order of admission; `order` arranges the requests of one client."""
        if len(self._lanes) == 1:
            yield from list(order(next(iter(self._lanes.values())).reqs))
            return
        heads: list[tuple[tuple[bool, int, float, int], Iterator[Req], Req]] = []
        for lane in self._lanes.values():
            reqs = iter(list(order(lane.reqs)))
            _push(heads, reqs, lane.start)
        while heads:
            (_, _, start, _), reqs, req = heapq.heappop(heads)
            yield req
            _push(heads, reqs, start + req.total_limit)

    def _forget(self) -> None:
        """Forget the clients that would continue at the current time, which may stand still, and those that were given least.

        It runs again when there are twice as many, so its cost per request does not grow with the number of clients.
        """
        ahead = ((end, name) for name, end in self._finished.items() if end > self._time)
        self._finished = {name: end for end, name in heapq.nlargest(MAX_REMEMBERED, ahead)}
        self._forget_above = 2 * len(self._finished)


def _push(heads: list[tuple[tuple[bool, int, float, int], Iterator[Req], Req]], reqs: Iterator[Req], start: float) -> None:
    req = next(reqs, None)
    if req is not None:
        heapq.heappush(heads, (_key(req, start), reqs, req))


def _key(req: Req, start: float) -> tuple[bool, int, float, int]:
    return (not req.retracted or req.made_way, -req.shared_priority, start, req.seq)
