"""Scheduling decisions as pure functions: the order of admission, which request is retracted, and whether memory suffices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from runtime.batch import WorkerLimits
from runtime.errors import ContextTooLong, NeverFits, RequestError
from runtime.managers.messages import GenerateReq
from runtime.managers.req import Req
from runtime.mem_cache.radix_cache import common_prefix_len, shortest_reusable

LPM_QUEUE_LIMIT = 128
"""A longer queue is served in order of arrival: matching every prompt against the cache would take too long."""
SHARED_PREFIX_TOKENS = 32
"""A prompt waits for another that is prefilling if it can then reuse at least this many more cached tokens."""
REQUEST_TOKENS = 128
"""Cached tokens that outweigh one request in the choice of an attention group."""


# ---- attention groups


def best_group(groups: Iterable[tuple[int, int]]) -> int:
    """The index of the best group for a request, given its cached prefix length and the number of requests in each; the first if equal."""
    gains = [cached_len - REQUEST_TOKENS * requests for cached_len, requests in groups]
    return gains.index(max(gains))


# ---- admission


def check_memory(req: GenerateReq, limits: WorkerLimits) -> None:
    """Raise `RequestError` if the request could not run even alone. Its other values were checked before it was sent."""
    ids = req.input_ids
    if not ids:  # it would block the queue forever
        raise RequestError("The prompt is empty.")
    if len(ids) >= limits.max_context_len:
        raise ContextTooLong(len(ids), limits.max_context_len)
    total = min(len(ids) + req.sampling.max_new_tokens, limits.max_context_len)
    needed = slots_alone(len(ids), total, limits.tokens_per_step)
    if -(-needed // limits.page_size) * limits.page_size > limits.max_total_tokens:
        raise NeverFits(needed, limits.max_total_tokens)


def slots_alone(prompt_len: int, total_limit: int, tokens_per_step: int) -> int:
    """KV slots that a request needs when it runs alone: its last decode step starts at KV length `total_limit - 2`."""
    last_step = total_limit - 2 + tokens_per_step if total_limit > prompt_len + 1 else 0
    return max(prompt_len, last_step)


# ---- order


def queue_key(req: Req) -> tuple[bool, int, int]:
    """The sort key of the queue: retracted requests first, then higher priority, then arrival."""
    return (not req.retracted, -req.request.priority, req.seq)


def order(queue: Sequence[Req], policy: Literal["fcfs", "lpm"], cached_len: Callable[[Req], int]) -> list[Req]:
    """The order of admission of a queue sorted by `queue_key`; at equal priority, lpm prefers long cached prefixes."""
    if policy == "fcfs" or not 1 < len(queue) <= LPM_QUEUE_LIMIT:
        return list(queue)
    return sorted(queue, key=lambda req: (not req.retracted, -req.request.priority, -cached_len(req), req.seq))


def defer_for_shared_prefix(req: Req, cached_len: int, prefilling: Iterable[Req], limits: WorkerLimits) -> bool:
    """Whether `req` should wait because a prompt in `prefilling` is computing a prefix that `req` can then reuse.

    Only whole pages of that prompt will be cached. A cached prefix can be reused if the `prefix_lookahead` tokens after it match as well,
    and at least one token of `req` must remain to compute.
    """
    size = limits.page_size
    shared = shortest_reusable(cached_len + SHARED_PREFIX_TOKENS, size)
    end, ids, salt = shared + limits.prefix_lookahead, req.ids, req.request.cache_salt
    return len(ids) > shared and any(
        other.request.cache_salt == salt
        and shared <= other.prefill_len // size * size
        and common_prefix_len(other.ids[:end], ids[:end]) == end
        for other in prefilling
    )


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


def youngest(reqs: Iterable[Req]) -> Req:
    """The request to retract first: lowest priority, then latest arrival. Between clients only the shared priority counts."""
    reqs = list(reqs)
    alone = len({req.request.client for req in reqs}) == 1
    return max(reqs, key=lambda req: (-(req.request.priority if alone else req.shared_priority), req.seq))


# ---- memory


def decode_slots(kv_bound: int, limits: WorkerLimits) -> int:
    """KV slots that a request of KV length at most `kv_bound` must have before it decodes once more."""
    return min(kv_bound + limits.tokens_per_step, limits.max_context_len + 2 * limits.tokens_per_step)
