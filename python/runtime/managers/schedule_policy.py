"""Who runs next, and how much of it: pure functions of requests and numbers."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.batch import WorkerLimits
from runtime.errors import ContextTooLong, InvalidField, NeverFits
from runtime.managers.messages import GenerateReq
from runtime.managers.req import Req
from runtime.mem_cache.radix_cache import agreement
from runtime.sampling_params import MAX_TOP_LOGPROBS

LPM_QUEUE_LIMIT = 128
"""Matching every waiting prompt against the cache is worth it only for so many; beyond, first come is first served."""
OUTLOOK_LIMIT = 4096
"""Output tokens beyond this are not reserved ahead: few requests use all they may."""
FIRST_RATIO = 0.7
"""Share of the allowed output that is reserved at conservativeness 1, right after a retraction and at start."""
LAST_RATIO_SHARE = 0.2
"""What the ratio falls to, relative to the first, while nothing is retracted."""
RATIO_STEPS = 600
"""Decode steps for that fall."""
FEW_PROMPTS = 8
"""While no more are under way, a prompt that keeps the device busy shares its step with no other: of equal ones the first is through after
one step and not after two. Among more, that is won for a smaller part of them, and long steps are a few per cent faster."""
TWIN_TOKENS = 32
"""A prompt waits for another that is being prefilled if it can then reuse this many tokens more."""


# ---- may it come in at all


def check_request(req: GenerateReq, limits: WorkerLimits) -> None:
    """Raise the `RequestError` that says why this request can never run; else return."""
    ids = req.input_ids
    if not ids:
        raise InvalidField("input_ids", [], "an array of at least 1 token id")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise InvalidField("input_ids", wrong, f"an integer between 0 and {limits.vocab_size - 1}", subject="A token id")
    req.sampling.check(limits.vocab_size)
    if not -1 <= req.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidField("top_logprobs", req.top_logprobs, f"an integer between -1 and {MAX_TOP_LOGPROBS}")
    if not -(1 << 63) <= req.seed < 1 << 63:
        raise InvalidField("seed", req.seed, "a signed 64-bit integer")
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


# ---- in which order


def queue_key(req: Req) -> tuple[bool, int, int]:
    """Sorts the queue: retracted requests first, then higher priority, then arrival."""
    return (not req.retracted, -req.source.priority, req.seq)


def enqueue(queue: list[Req], req: Req) -> None:
    """Put `req` in its place of a queue sorted by `queue_key`."""
    insort(queue, req, key=queue_key)


def order(queue: Sequence[Req], policy: Literal["fcfs", "lpm"], cached_len: Callable[[Req], int]) -> list[Req]:
    """The waiting requests as they should be tried. `queue` is sorted by `queue_key`; lpm moves long cached prefixes ahead among equals."""
    if policy == "fcfs" or not 1 < len(queue) <= LPM_QUEUE_LIMIT:
        return list(queue)
    return sorted(queue, key=lambda req: (not req.retracted, -req.source.priority, -cached_len(req), req.seq))


def waits_for_twin(req: Req, cached_len: int, filling: Iterable[Req], limits: WorkerLimits) -> bool:
    """Whether a prompt under way shares so much with `req` that its KV is better waited for than computed twice.

    What can be reused is whole pages, each with the `prefix_lookahead` tokens after it, and leaves a token to compute.
    """
    worth = -(-(cached_len + TWIN_TOKENS) // limits.page_size) * limits.page_size
    end, ids = worth + limits.prefix_lookahead, req.ids
    return len(ids) > worth and any(
        other.source.cache_salt == req.source.cache_salt and agreement(other.ids[:end], ids[:end]) == end for other in filling
    )


# ---- how much memory


@dataclass(frozen=True, slots=True)
class Outlook:
    """How far running requests are expected to grow.

    `ratio` is the share of their remaining output that is held free for them: it starts at 0.7 * conservativeness (at most 1), falls
    while all goes well, and returns to its start when a request had to be retracted.
    """

    conservativeness: float
    ratio: float

    @classmethod
    def start(cls, conservativeness: float) -> Outlook:
        """Before the first step, and after a retraction."""
        return cls(conservativeness, min(1.0, FIRST_RATIO * conservativeness))

    def after_decode(self) -> Outlook:
        """One decode step went well."""
        first = min(1.0, FIRST_RATIO * self.conservativeness)
        last = first * LAST_RATIO_SHARE
        return Outlook(self.conservativeness, max(last, self.ratio - (first - last) / RATIO_STEPS))

    def slots(self, req: Req, limits: WorkerLimits) -> int:
        """KV slots that `req` is expected to hold in the end, what a decode step writes ahead included."""
        growth = int(min(req.remaining, OUTLOOK_LIMIT) * self.ratio)
        return req.length + growth + step_slack(limits)


def step_slack(limits: WorkerLimits) -> int:
    """Slots past the known KV length that one decode step may need, with another in flight."""
    return limits.tokens_per_step + (limits.max_accept_len if limits.overlap else 0)


def decode_slots(req: Req, limits: WorkerLimits) -> int:
    """Positions that must have pages before `req` decodes once more."""
    most = limits.max_context_len + 2 * limits.tokens_per_step
    return min(req.kv_bound(limits.max_accept_len) + limits.tokens_per_step, most)


def youngest(reqs: Iterable[Req]) -> Req:
    """Who is retracted first: lowest priority, then latest arrival."""
    return max(reqs, key=lambda req: (-req.source.priority, req.seq))


# ---- how many prompt tokens


@dataclass(slots=True)
class PrefillBudget:
    """Prompt tokens left in one EXTEND batch.

    Attributes:
        left: tokens that the batch can still take.
        chunked: whether a prompt may be cut; if not, only one longer than the worker's limit is, into pieces of that.
        most: the worker's limit.
        enough: prompt tokens with which no other prompt is taken in.
        taken: prompt tokens so far.
    """

    left: int
    chunked: bool
    most: int
    enough: int
    taken: int = 0

    @classmethod
    def start(cls, chunked_prefill_size: int, max_prefill_tokens: int, limits: WorkerLimits, prompts: int = 0) -> PrefillBudget:
        """For an empty batch, with so many `prompts` under way; a `chunked_prefill_size` below 1 leaves prompts whole."""
        room = min(n for n in (chunked_prefill_size, max_prefill_tokens, limits.max_extend_tokens) if n > 0)
        enough = limits.busy_tokens if limits.busy_tokens and prompts <= FEW_PROMPTS else room
        return cls(room, chunked_prefill_size > 0, limits.max_extend_tokens, enough)

    def seats(self, tokens_per_step: int) -> int:
        """How many requests may decode along: half of the batch at least is the prompts'; 0 where prompts are not cut to make room."""
        return self.left // 2 // tokens_per_step if self.chunked else 0

    def offer(self, wanted: int, first: bool) -> int:
        """How many of the `wanted` tokens of the next prompt fit, 0 if it has to wait; `first` if the batch is still empty."""
        if not first and self.taken >= self.enough:
            return 0
        if self.chunked or wanted <= self.left:
            return min(wanted, self.left)
        return min(wanted, self.most) if first else 0

    def keep_free(self, count: int) -> None:
        """Leave room for tokens of those who decode along, if in the end they do."""
        self.left = max(0, self.left - count)

    def take(self, count: int) -> None:
        """Count tokens of a prompt."""
        self.left = max(0, self.left - count)
        self.taken += count
