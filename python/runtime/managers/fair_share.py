"""Which requests make way for those of other clients: neither long prompts nor many samples of one client keep others waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.managers import schedule_policy as policy
from runtime.managers.fair_queue import FairQueue
from runtime.managers.req import Req


def overtakes(req: Req, prefilling: Sequence[Req]) -> bool:
    """Whether the waiting `req` goes before the prompts that run: they are of other clients and at least twice as long.

    A prompt is overtaken by no more tokens than it has, so it takes at most twice as long.
    """
    slow = [other for other in prefilling if not other.overtook]
    return bool(slow) and all(
        other.request.client != req.request.client
        and 2 * req.length <= other.prefill_len - other.kv_bound
        and other.overtaken + req.length <= other.prefill_len
        for other in slow
    )


def to_retract(first: Req, queue: FairQueue, running: Sequence[Req], rows: Mapping[str, int]) -> Req | None:
    """The running request whose row and pages the waiting request `first` gets, if that makes the shares of their clients more equal.

    Args:
        rows: running requests by client.
    """
    client = max(rows, key=lambda name: rows[name], default="")
    if rows.get(client, 0) < rows.get(first.request.client, 0) + 2 or not queue.precedes(first, client):
        return None
    return policy.youngest([req for req in running if req.request.client == client])
