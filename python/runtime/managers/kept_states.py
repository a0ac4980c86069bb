"""Where the prompts of a model with recurrent states leave copies of their states, with which later prompts begin."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.batch import WorkerLimits
from runtime.managers.req import Req
from runtime.mem_cache.radix_cache import common_prefix_len

LEAST_TOKENS = 256
"""A state is kept, and waited for, if it spares at least this many tokens: it takes as much memory as thousands of tokens of keys and
values."""
PEERS = 16
"""Waiting requests with which a prompt is compared when it is admitted."""


def kept_lens(req: Req, start: int, known: int, waiting: Iterable[Req], limits: WorkerLimits) -> list[int]:
    """Numbers of tokens after which the prompt of `req` leaves its state, ascending: where other prompts part from it, and near its end.

    Args:
        start: tokens whose state is cached.
        known: leading tokens that other requests had too, even if no state is cached behind them.
        waiting: requests that may have a prefix in common with `req`.
    """
    unit = limits.state_unit
    if not unit or not limits.cached_states:
        return []
    ids, salt = req.ids, req.request.cache_salt
    shared = [common_prefix_len(ids, other.ids) - limits.prefix_lookahead for other in waiting if other.request.cache_salt == salt]
    last = req.length - 1
    wanted = sorted({min(length, last) // unit * unit for length in (max([known, *shared]), last)})
    kept = list[int]()
    for length in wanted:
        if length - (kept[-1] if kept else start) >= LEAST_TOKENS:
            kept.append(length)
    return kept


def whole_units(start: int, count: int, prompt_len: int, unit: int, *, first: bool) -> int:
    """How many of `count` tokens of a prompt run in one step, so that its next chunk begins at a multiple of `unit`; 0 if it waits for a
    step with more room.

    `first`: whether the step has no other prompt. Other steps have no more room then, so the chunk may end between two multiples.
    """
    stop = start + count
    if stop >= prompt_len:
        return count
    whole = stop // unit * unit - start
    return whole if whole > 0 else count if first else 0


def state_in_chunk(req: Req, count: int, unit: int) -> tuple[int, int]:
    """Size of the next chunk of `req`, at most `count` tokens, and the number of tokens of the prompt after which it leaves its state; 0 if
    it does not.

    A chunk leaves one state, a multiple of `unit` tokens after its start. Behind a chunk that ends between two multiples none is left.
    """
    start, end = req.kv_bound, req.kv_bound + count
    if end < req.prefill_len and end % unit:
        req.kept_lens = []
    within = [length for length in req.kept_lens if start < length <= end]
    if len(within) > 1:
        end = within[0]
    return end - start, within[0] if within else 0


def defer_for_state(req: Req, cached_len: int, prefilling: Iterable[Req], limits: WorkerLimits) -> bool:
    """Whether `req` should wait because a prompt in `prefilling` is going to leave a state that `req` can then begin with."""
    ids, salt, ahead = req.ids, req.request.cache_salt, limits.prefix_lookahead
    return any(
        cached_len + LEAST_TOKENS <= length < len(ids)
        and other.request.cache_salt == salt
        and common_prefix_len(other.ids[: length + ahead], ids) == length + ahead
        for other in prefilling
        for length in other.kept_lens
    )
