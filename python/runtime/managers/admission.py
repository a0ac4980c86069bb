"""Admission: assigns rows, KV pages and prompt tokens of a step to waiting requests, and frees them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from runtime.batch import StateCopy, WorkerLimits
from runtime.config.runtime_config import SchedulerConfig
from runtime.managers import kept_states
from runtime.managers import schedule_policy as policy
from runtime.managers.fair_queue import FairQueue
from runtime.managers.new_token_ratio import NewTokenRatio
from runtime.managers.prefill_budget import PrefillBudget
from runtime.managers.req import Phase, Req
from runtime.managers.step_plan import Chunk, PageCopy, StepPlan
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.mem_cache.kv_page_manager import KVPageManager
from runtime.mem_cache.state_slots import StateSlots

log = logging.getLogger(__name__)


class Admission:
    """Owns the waiting queue, the rows and the KV pages.

    Args:
        config: the scheduler's configuration.
        cache_prefixes: whether KV of earlier prompts is reused.
        limits: the worker's limits.
        stats: counts admissions and retractions.
        clock: monotonic seconds.

    Attributes:
        queue: waiting requests.
        running: requests with a row, in the order of admission.
        kv_pages: the KV pages of running requests and of the prefix cache.
        new_token_ratio: the estimate of how far running requests will grow.
    """

    def __init__(
        self, config: SchedulerConfig, cache_prefixes: bool, limits: WorkerLimits, stats: SchedulerStats, clock: Callable[[], float]
    ) -> None:
        self.queue = FairQueue()
        self.running: list[Req] = []
        pages = limits.max_total_tokens // limits.page_size
        states = StateSlots(limits.cached_states) if limits.state_unit else None
        self.kv_pages = KVPageManager(pages, limits.page_size, limits.prefix_lookahead, cache_prefixes, states)
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self._config = config
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._free_rows = list(range(limits.max_running_requests, 0, -1))
        self._rows_by_client: Counter[str] = Counter()
        self._short_of_pages: Req | None = None  # the request that could not be admitted because too few pages were free

    @property
    def free_rows(self) -> int:
        """Number of rows that no request has."""
        return len(self._free_rows)

    def offer(self, req: Req) -> tuple[int, int]:
        """The cached prefix length of `req` in this group, and the group's number of requests, for `policy.best_group`."""
        return self._cached_len(req), len(self.running) + len(self.queue)

    def enqueue(self, req: Req) -> None:
        """Add `req` to the waiting queue."""
        req.phase = Phase.WAITING
        self.queue.add(req)

    @property
    def decoding(self) -> list[Req]:
        """The running requests of which one more decode step can emit tokens: the steps in flight may end before the length limit."""
        phase = Phase.DECODING
        return [req for req in self.running if req.phase is phase and req.emits_in_flight < req.total_limit - req.length]

    # ---- prompts

    def plan_prompts(self) -> StepPlan | None:
        """The next prompt step: chunks of admitted prompts, new admissions, and decode rows with `--enable-mixed-chunk`."""
        prefilling = [req for req in self.running if req.phase is Phase.PREFILLING]
        if not prefilling and not self.queue:
            return None
        waiting = self.queue.tokens + sum(req.prefill_len - req.kv_bound for req in prefilling)
        budget = PrefillBudget.start(self._config, self._limits, len(prefilling) + len(self.queue), waiting)
        plan, decodes, overtaking = StepPlan(), self._piggyback(budget), False
        if prefilling and len(self._rows_by_client.keys() | self.queue.clients) > 1:
            budget.left = min(budget.left, self._limits.saturating_tokens or budget.left)
            self._admit(plan, budget, prefilling)
            # Prompts that overtake others run without them, so that their first token takes only the time of a short step.
            ahead = [req for req in prefilling if req.overtook]
            prefilling, overtaking = (ahead, True) if ahead or plan.chunks else (prefilling, False)
        for req in prefilling:
            self._add_chunk(plan, budget, req)
        if not overtaking:
            self._admit(plan, budget)
        if not plan.chunks:
            return None
        if decodes and plan.prompt_tokens >= self._limits.piggyback_min_tokens:
            self.add_decodes(plan, decodes)  # if too few pages are free, the prompts run alone instead of retracting a request
        return plan

    def _piggyback(self, budget: PrefillBudget) -> list[Req]:
        """The requests that may decode in a prompt step, all or none. Their tokens are reserved in the budget."""
        reqs = self.decoding if self._limits.mixed else []
        if len(reqs) > budget.decode_rows(self._limits.tokens_per_step):
            return []
        budget.reserve(len(reqs) * self._limits.tokens_per_step)
        return reqs

    def _admit(self, plan: StepPlan, budget: PrefillBudget, prefilling: Sequence[Req] = ()) -> None:
        """Admit waiting requests in order while rows, pages and the budget suffice. A request without enough pages blocks those after it.

        `prefilling`: admit only requests that overtake these prompts.
        """
        if not self.queue or not self._free_rows or budget.left == 0:
            return
        ordered: Iterable[Req]
        if prefilling:
            ordered = [req for req in self.queue.heads() if policy.overtakes(req, prefilling)]
        else:
            ordered = self.queue.ordered(lambda reqs: policy.order(reqs, self._config.schedule_policy, self._cached_len))
        unfinished = [other for other in self.running if other.kv_len < other.prefill_len]
        reserved: int | None = None
        for req in ordered:
            if not self._free_rows or budget.left == 0:
                return
            cached = self._cached_len(req)
            shares = self.kv_pages.cache_prefixes and not req.needs_whole_prompt
            if shares and self._defers(req, cached, unfinished):
                continue
            if self._offer(plan, budget, cached, req.length) == 0:
                return
            if reserved is None:
                reserved = sum(map(self._missing_pages, self.running))
            if not self._allocate_row(plan, req, reserved):
                self._short_of_pages = req
                return
            if prefilling:
                req.overtook = True
                for other in prefilling:
                    other.overtaken += req.length
            reserved += self._missing_pages(req)
            unfinished.append(req)
            self._add_chunk(plan, budget, req)

    def _add_chunk(self, plan: StepPlan, budget: PrefillBudget, req: Req) -> None:
        """Add as many tokens of a prompt as fit. With recurrent states, the chunk may leave one of them for later prompts."""
        count, kept_len, slot = self._offer(plan, budget, req.kv_bound, req.prefill_len), 0, 0
        if count and self._limits.state_unit:
            count, kept_len = kept_states.state_in_chunk(req, count, self._limits.state_unit)
        if kept_len:
            state = self.kv_pages.keep_state(req.pages, kept_len)
            kept_len, slot = (0, 0) if state is None else (kept_len, state.slot)
        if count:
            plan.chunks.append(Chunk(req, req.kv_bound, count, kept_len, slot))
            budget.take(count)

    def _offer(self, plan: StepPlan, budget: PrefillBudget, start: int, prompt_len: int) -> int:
        """How many of the tokens from `start` on of a prompt fit; 0 if it must wait."""
        first, unit = not plan.chunks, self._limits.state_unit
        count = budget.offer(prompt_len - start, first=first)
        return kept_states.whole_units(start, count, prompt_len, unit, first=first) if unit else count

    def _defers(self, req: Req, cached_len: int, unfinished: Sequence[Req]) -> bool:
        """Whether `req` waits for one of the `unfinished` prompts, to reuse what it caches."""
        defer = kept_states.defer_for_state if self._limits.state_unit else policy.defer_for_shared_prefix
        return defer(req, cached_len, unfinished, self._limits)

    def _cached_len(self, req: Req) -> int:
        return 0 if req.needs_whole_prompt else self.kv_pages.cached_len(req.ids, req.request.cache_salt)

    def _missing_pages(self, req: Req) -> int:
        """Pages that `req` is expected to need in addition to those it has."""
        return max(0, self.kv_pages.pages_for(self.new_token_ratio.slots(req, self._limits)) - req.pages.count)

    def _allocate_row(self, plan: StepPlan, req: Req, reserved: int) -> bool:
        """Give `req` a row and pages for all its tokens; False if fewer than `reserved` pages would remain."""
        kv_pages = self.kv_pages
        req.pages = pages = kv_pages.open(req.ids, req.request.cache_salt, reuse=not req.needs_whole_prompt)
        missing = kv_pages.pages_for(req.length) - pages.count
        if not self.running and missing > kv_pages.available:
            kv_pages.drop_partial(pages)  # a single request may need even the page that the partial match locks
        if (reserved + self._missing_pages(req) if self.running else missing) > kv_pages.available:
            assert self.running, "`check_memory` admits only requests that fit when they run alone"
            kv_pages.close(pages, req.ids, 0)
            return False
        kv_pages.grow([pages], [missing])
        first_time = not req.was_admitted
        self.queue.admit(req)
        req.admit(self._free_rows.pop(), pages, kv_pages.reused_len(pages), self._clock())
        if first_time:
            self._stats.admitted(req.progress)
        self.running.append(req)
        self._rows_by_client[req.request.client] += 1
        plan.new_rows.append(req.row_init(self._limits.needs_history))
        plan.writes.add([req.row], [0], [pages.count], pages.ids.copy())
        if pages.state is not None:
            plan.restored.append(StateCopy(req.row, pages.state.slot, req.kv_len))
        if self._limits.state_unit:
            known = kv_pages.known_len(req.ids, req.request.cache_salt)
            waiting = islice(self.queue, kept_states.PEERS)
            req.kept_lens = kept_states.kept_lens(req, req.kv_len, known, waiting, self._limits)
        if pages.partial is not None:
            plan.copies.append(PageCopy(pages.partial.page, int(pages.ids[pages.shared]), pages.partial.count))
        return True

    # ---- decode rows

    def add_decodes(self, plan: StepPlan, reqs: list[Req]) -> bool:
        """Add `reqs` to the plan, with the pages for one more decode step; False if there are not enough."""
        limits, kv_pages = self._limits, self.kv_pages
        size, ahead = kv_pages.page_size, limits.tokens_per_step
        growing = [  # `decode_slots` is at most the sum, which is quick to compare
            req
            for req in reqs
            if req.kv_bound + ahead > (held := req.pages.count * size) and policy.decode_slots(req.kv_bound, limits) > held
        ]
        if growing:
            pages = [req.pages for req in growing]
            targets = [kv_pages.pages_for(policy.decode_slots(req.kv_bound, limits)) for req in growing]
            counts = [target - each.count for target, each in zip(targets, pages, strict=True)]
            if sum(counts) > kv_pages.available:
                return False
            cols = [each.count for each in pages]
            plan.writes.add([req.row for req in growing], cols, counts, kv_pages.grow(pages, counts))
        plan.decodes = reqs
        return True

    # ---- endings

    def retract_youngest(self) -> None:
        """Take the row and pages of one request; it goes to the front of the queue and resumes where it stopped."""
        assert len(self.running) > 1, "`check_memory` admits only requests that fit when they run alone"
        req = policy.youngest(self.running)
        self._retract(req)
        self.new_token_ratio.reset()
        log.info("KV cache is full: retracted a request of %d tokens; %d requests are running", req.length, len(self.running))

    def retraction_candidate(self) -> Req | None:
        """The running request to retract so that a waiting one of another client gets its row or pages; None if there is none.

        Its client has at least two rows more than that of the waiting request, and was served more.
        """
        first = self._short_of_pages if self._free_rows else next(iter(self.queue.heads()), None)
        if first is None or first.phase is not Phase.WAITING:
            return None
        rows = self._rows_by_client
        client = max(rows, key=rows.__getitem__, default="")
        if rows[client] < rows[first.request.client] + 2 or not self.queue.precedes(first, client):
            return None
        return policy.youngest(req for req in self.running if req.request.client == client)

    def retract_for_waiting(self) -> None:
        """Retract `retraction_candidate`, if there is one; no step may be in flight."""
        if (req := self.retraction_candidate()) is not None:
            req.retracted_for_fairness = True
            self._retract(req)

    def _retract(self, req: Req) -> None:
        self._free(req, keep=True)
        req.retract()
        self.enqueue(req)
        self._stats.num_retracted_requests_total += 1

    def remove(self, req: Req, keep: bool) -> None:
        """End `req`, waiting or running; with `keep`, its committed KV stays in the prefix cache."""
        if req.phase is Phase.WAITING:
            self.queue.remove(req)
        elif req.phase is not Phase.COMPILING:
            self._free(req, keep)
        req.end()

    def _free(self, req: Req, keep: bool) -> None:
        """Free the row and pages.

        A step in flight may still write to them, but only beyond `kv_len`, and before any step submitted from now on runs.
        """
        self.kv_pages.close(req.pages, req.ids, req.cacheable_len if keep else 0)
        self.running.remove(req)
        self._free_rows.append(req.row)
        self._short_of_pages = None
        self._rows_by_client[req.request.client] -= 1
        self._rows_by_client += Counter()  # drops clients without rows
