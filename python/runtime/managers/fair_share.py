"""Fairness between clients: long prompts or many samples of one client do not keep the requests of others waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.managers import schedule_policy as policy
from runtime.managers.fair_queue import FairQueue
from runtime.managers.req import Req


def overtakes(req: Req, prefilling: Sequence[Req]) -> bool:
    """Whether the waiting `req` runs before the prompts that are prefilling: they are of other clients and at least twice as long.

    A prompt is overtaken by at most as many tokens as it has, so it takes at most twice as long.
    """
    slow = [other for other in prefilling if not other.overtook]
    return bool(slow) and all(
        other.request.client != req.request.client
        and 2 * req.length <= other.prefill_len - other.kv_bound
        and other.overtaken + req.length <= other.prefill_len
        for other in slow
    )


def retraction_candidate(first: Req, queue: FairQueue, running: Sequence[Req], rows: Mapping[str, int]) -> Req | None:
    """The running request to retract for the waiting request `first`, if its client has at least two rows more than that of `first`.

    Args:
        rows: running requests by client.
    """
    client = max(rows, key=lambda name: rows[name], default="")
    if rows.get(client, 0) < rows.get(first.request.client, 0) + 2 or not queue.precedes(first, client):
        return None
    return policy.youngest([req for req in running if req.request.client == client])
