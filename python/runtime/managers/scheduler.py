"""The loop: receive, admit, submit, collect, reply."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from runtime.batch import BatchResult, Pending, RowInit, ScheduleBatch, Worker
from runtime.config.runtime_config import RuntimeConfig
from runtime.errors import QueueFull, RequestError, ServerDraining, ServingError, StepFailed
from runtime.managers import schedule_policy as policy
from runtime.managers.batching import Chunk, PageWrites, make_batch
from runtime.managers.messages import (
    AbortReq,
    ControlReply,
    ControlReq,
    DrainReq,
    Finish,
    GenerateReq,
    Heartbeat,
    StopReq,
    ToDetokenizer,
    TokensOut,
    TokensOutBatch,
    ToScheduler,
)
from runtime.managers.replies import collect_prompt_logprobs, failure, is_due, refusal, request_info, token_out
from runtime.managers.req import Phase, Req
from runtime.managers.telemetry.heartbeat import Pulse
from runtime.managers.telemetry.scheduler_stats import Gauges, SchedulerState
from runtime.managers.telemetry.spec_stats import SpecTally
from runtime.mem_cache.kv_page_manager import PageLedger

log = logging.getLogger(__name__)

IDLE_WAIT = 0.5
"""Seconds to sleep on the inbox when there is nothing to do."""
FAILURES_ALLOWED = 2
FAILURE_WINDOW = 60.0
"""More failed steps than allowed within so many seconds, and the process gives up."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was submitted and not read yet."""

    batch: ScheduleBatch
    pending: Pending
    plan: Plan


@dataclass(slots=True)
class Plan:
    """A step about to be submitted: prompt chunks, decoding requests, or both in one pass."""

    chunks: list[Chunk] = field(default_factory=list)
    new_rows: list[RowInit] = field(default_factory=list)
    writes: PageWrites = field(default_factory=PageWrites)
    decoding: list[Req] = field(default_factory=list)

    @property
    def reqs(self) -> list[Req]:
        """All requests in this step, in the order of the batch."""
        return [*(chunk.req for chunk in self.chunks), *self.decoding]


class Scheduler:
    """Decides what the worker runs, and tells everyone what came of it.

    With overlap, step n + 1 is submitted before step n is read; when a step is chosen, at most one other is unread.
    A request's pages and row are given back in one place, `_release`, and its end is told in one place, `_end`.

    Args:
        config: what the user asked for.
        worker: the device.
        eos_ids: tokens that end a text.
        receive: the next message, or None after that many seconds without one.
        send: passes a message to the detokenizer; safe to call from any thread.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        worker: Worker,
        eos_ids: tuple[int, ...],
        receive: Callable[[float], ToScheduler | None],
        send: Callable[[ToDetokenizer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config.scheduler
        self._worker = worker
        self._eos_ids = eos_ids
        self._receive = receive
        self._send = send
        self._clock = clock
        self.limits = limits = worker.limits
        num_pages, radix_cache = limits.max_total_tokens // limits.page_size, config.cache.radix_cache
        self.ledger = PageLedger(num_pages, limits.page_size, limits.prefix_lookahead, radix_cache)
        self.queue: list[Req] = []  # sorted by policy.queue_key
        self.running: list[Req] = []  # those with a row, in the order of admission
        self.state = SchedulerState(clock())
        self._reqs: dict[str, Req] = {}
        self._free_rows = list(range(limits.max_running_requests, 0, -1))
        self._flights: deque[Flight] = deque()
        self._outlook = policy.Outlook.start(self._config.schedule_conservativeness)
        self._overlap = limits.overlap and self._config.overlap
        self._prompt_tokens = 0  # run since the last decode step
        self._draining = False
        self._failures: deque[float] = deque()
        self._startup_seconds = worker.info().get("startup_seconds", {})
        self._arrivals = self._steps = self._beats = 0
        self._moved_at = time.monotonic()

    # ---- the loop

    def run(self) -> None:
        """Serve until drained. Raises the worker's error when step after step fails."""
        with Pulse(lambda: self._send(self.heartbeat()), lambda: self._moved_at, self._config.watchdog_timeout):
            while not self.drained:
                self.step(IDLE_WAIT)
        self._send(DrainReq())

    @property
    def drained(self) -> bool:
        """Whether shutting down was asked for, and nothing is left to do."""
        return self._draining and self.idle

    @property
    def idle(self) -> bool:
        """Whether no request is alive and nothing is in flight."""
        return not self._reqs and not self._flights

    def step(self, wait: float = 0.0) -> None:
        """Once around the loop; sleeps up to `wait` seconds for a message if there is nothing to do."""
        self._moved_at = time.monotonic()
        self._receive_all(wait if self.idle else 0.0)
        plan = self._plan()
        submitted = plan is not None and self._submit(plan)
        allowed = 1 if submitted and self._overlap else 0
        while len(self._flights) > allowed:
            self._collect()
        self.state.tick(self._clock(), self.gauges())

    # ---- messages in

    def _receive_all(self, wait: float) -> None:
        message = self._receive(wait)
        while message is not None:
            self._handle(message)
            message = self._receive(0.0)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case GenerateReq():
                self._take_in(message)
            case AbortReq():
                self._abort(message)
            case StopReq():
                self._stop(message)
            case ControlReq():
                self._send(self._control(message))
            case DrainReq():
                self._draining = True

    def _take_in(self, source: GenerateReq) -> None:
        if source.rid in self._reqs:
            log.error("dropped a second request named %s while the first is running", source.rid[:80])
            return
        self.state.num_requests_total += 1
        self._send(request_info(source))
        try:
            if self._draining:
                raise ServerDraining()
            policy.check_request(source, self.limits)
            if len(self.queue) - len(self._free_rows) >= self._config.max_queued_requests:  # who finds a free row does not wait
                raise QueueFull(self._config.max_queued_requests)
        except ServingError as error:
            self.state.num_aborted_requests_total += 1
            self._send(TokensOutBatch(outs=[refusal(source, failure(error))]))
            return
        self._arrivals += 1
        req = Req(source, self._arrivals, self._eos_ids, self.limits.max_context_len, self._clock())
        self._reqs[source.rid] = req
        policy.enqueue(self.queue, req)

    def _abort(self, message: AbortReq) -> None:
        chosen = list(self._reqs.values()) if message.all else [r for r in [self._reqs.get(message.rid)] if r is not None]
        finish = Finish(reason="abort", message="the request was aborted")
        outs = [self._end(req, finish) for req in chosen]
        if outs:
            self._send(TokensOutBatch(outs=outs))

    def _stop(self, message: StopReq) -> None:
        req = self._reqs.get(message.rid)
        if req is not None:
            self._release(req, keep=True)
            req.end(None)

    def _control(self, message: ControlReq) -> ControlReply:
        try:
            body = self._perform(message)
        except RequestError as error:
            return ControlReply(call_id=message.call_id, ok=False, error=str(error), refused=True)
        except Exception as error:  # whatever an administrative call meets is its caller's answer, not this process's end
            log.exception("%s failed", message.what)
            return ControlReply(call_id=message.call_id, ok=False, error=str(error))
        return ControlReply(call_id=message.call_id, ok=True, body=msgspec.json.encode(body))

    def _perform(self, message: ControlReq) -> dict[str, object]:
        match message.what:
            case "state":
                return {**self._figures(), "worker": self._worker.info()}
            case "flush_cache":
                return self._flush_cache()
            case "start_profile":
                self._worker.start_profile(message.folder)
                return {"folder": message.folder}
            case "stop_profile":
                return {"file": self._worker.stop_profile()}

    def _flush_cache(self) -> dict[str, object]:
        if self._reqs:
            raise ServingError(f"{len(self._reqs)} requests are alive; flush the cache when there are none")
        while self._flights:  # steps whose requests have all ended
            self._collect()
        cached = self.ledger.cache.total_pages
        self.ledger.flush()
        return {"flushed_pages": cached}

    # ---- choosing a step

    def _plan(self) -> Plan | None:
        """What to run next: prompts first, but no more than `max_prefill_tokens` of them while someone could decode and does not."""
        starving = self._prompt_tokens >= self._config.max_prefill_tokens and any(req.needs_decode for req in self.running)
        plan = None if starving else self._plan_extend()
        return plan or self._plan_decode()

    def _plan_extend(self) -> Plan | None:
        filling = [req for req in self.running if req.phase is Phase.PREFILLING]
        if not filling and not self.queue:
            return None
        config, prompts = self._config, len(filling) + len(self.queue)
        budget = policy.PrefillBudget.start(config.chunked_prefill_size, config.max_prefill_tokens, self.limits, prompts)
        plan, decoding = Plan(), self._piggybacked(budget)
        for req in filling:
            self._add_chunk(plan, budget, req)
        self._admit(plan, budget)
        if not plan.chunks:
            return None
        worth_it = sum(chunk.count for chunk in plan.chunks) >= self.limits.mixed_from
        if worth_it and self._missing_pages(decoding) <= self.ledger.available:  # else the prompts run alone: no retraction for this
            plan.decoding = decoding
            self._grow(decoding, plan.writes)
        return plan

    def _piggybacked(self, budget: policy.PrefillBudget) -> list[Req]:
        """The requests that may decode in the pass of a prompt batch, all or none; their tokens are taken off the budget."""
        reqs = [req for req in self.running if req.needs_decode] if self.limits.mixed else []
        if len(reqs) > budget.seats(self.limits.tokens_per_step):
            return []
        budget.keep_free(len(reqs) * self.limits.tokens_per_step)
        return reqs

    def _admit(self, plan: Plan, budget: policy.PrefillBudget) -> None:
        """Let waiting requests in, in order, while rows, memory and the budget last; nobody overtakes one that waits for memory."""
        if not self.queue or not self._free_rows or budget.left == 0:
            return
        ordered = policy.order(self.queue, self._config.schedule_policy, self._cached_len)
        for req in ordered:
            if not self._free_rows or budget.left == 0:
                return
            cached = self._cached_len(req)
            if self._waits_for_twin(req, cached):
                continue
            if budget.offer(req.length - cached, first=not plan.chunks) == 0 or not self._seat(plan, req):
                return
            self._add_chunk(plan, budget, req)

    def _waits_for_twin(self, req: Req, cached: int) -> bool:
        if not self.ledger.cache_prefixes or req.wants_prompt_logprobs:
            return False
        filling = [other for other in self.running if other.kv_len < other.fill_len]
        return policy.waits_for_twin(req, cached, filling, self.limits)

    def _cached_len(self, req: Req) -> int:
        return 0 if req.wants_prompt_logprobs else self.ledger.cached_len(req.ids, req.source.cache_salt)

    def _seat(self, plan: Plan, req: Req) -> bool:
        """Give `req` a row and pages for all its tokens, if the outlook of those who run leaves room."""
        ledger, limits = self.ledger, self.limits
        holding = ledger.open(req.ids, req.source.cache_salt, reuse=not req.wants_prompt_logprobs)
        target = ledger.pages_for(req.length)
        wanted = target - holding.count
        if self.running:
            everyone = [*((r, r.holding.count) for r in self.running if r.holding is not None), (req, holding.count)]
            wanted = sum(max(0, ledger.pages_for(self._outlook.slots(r, limits)) - count) for r, count in everyone)
        if wanted > ledger.available:
            assert self.running, "a request that fits alone does not fit alone"
            ledger.close(holding, req.ids, 0)
            return False
        prefix_len = holding.count * limits.page_size
        ledger.grow(holding, target)
        first_time = req.queue_seconds is None
        req.begin(self._free_rows.pop(), holding, prefix_len, self._clock())
        if first_time:
            self.state.admitted(req.prompt_len, prefix_len, req.queue_seconds or 0.0)
        self.queue.remove(req)
        self.running.append(req)
        plan.new_rows.append(req.row_init(self.limits.needs_history))
        plan.writes.add(req.row, 0, holding.pages.copy())
        return True

    def _add_chunk(self, plan: Plan, budget: policy.PrefillBudget, req: Req) -> None:
        count = budget.offer(req.fill_len - req.submitted, first=not plan.chunks)
        if count:
            plan.chunks.append(Chunk(req, req.submitted, count))
            budget.take(count)

    def _plan_decode(self) -> Plan | None:
        while True:
            reqs = [req for req in self.running if req.needs_decode]
            if self._missing_pages(reqs) <= self.ledger.available:
                break
            if self._flights:
                self._collect()  # may end requests, and then nobody has to go
            else:
                self._retract(policy.youngest(self.running))
        plan = Plan(decoding=reqs)
        self._grow(reqs, plan.writes)
        return plan if reqs else None

    def _grow(self, reqs: list[Req], writes: PageWrites) -> None:
        """Give each the pages that one more decode step needs."""
        for req in reqs:
            holding = req.holding
            assert holding is not None
            col = holding.count
            writes.add(req.row, col, self.ledger.grow(holding, self._decode_pages(req)))

    def _missing_pages(self, reqs: list[Req]) -> int:
        """Pages to be found before they decode once more."""
        return sum(max(0, self._decode_pages(req) - req.holding.count) for req in reqs if req.holding is not None)

    def _decode_pages(self, req: Req) -> int:
        return self.ledger.pages_for(policy.decode_slots(req, self.limits))

    def _retract(self, req: Req) -> None:
        """Take a request's row and pages; it goes to the front of the queue and later on from where it was."""
        assert len(self.running) > 1, "a request that fits alone does not fit alone"
        self._give_back(req, keep=True)
        req.suspend()
        policy.enqueue(self.queue, req)
        self._outlook = policy.Outlook.start(self._config.schedule_conservativeness)
        self.state.num_retracted_requests_total += 1
        log.info("KV is full: retracted a request of %d tokens, %d still run", req.length, len(self.running))

    # ---- submitting

    def _submit(self, plan: Plan) -> bool:
        """Hand the step to the worker; False if that failed, and its requests with it."""
        self._steps += 1
        batch = make_batch(self._steps, plan.chunks, plan.decoding, plan.new_rows, plan.writes, self.limits)
        self._prompt_tokens = 0 if plan.decoding else self._prompt_tokens + len(batch.token_ids)
        try:
            pending = self._worker.submit(batch)
        except Exception as error:  # the step's requests are answered; `_step_failed` raises it again when it keeps happening
            self._step_failed(plan.reqs, error)
            return False
        for chunk in plan.chunks:
            chunk.req.submitted = chunk.end
            if chunk.is_last:
                chunk.req.phase = Phase.DECODING
                chunk.req.emits_in_flight += 1
        for req in plan.decoding:
            req.decodes_in_flight += 1
            req.emits_in_flight += 1
        self._flights.append(Flight(batch, pending, plan))
        return True

    # ---- collecting

    def _collect(self) -> None:
        """Read the oldest step in flight and tell its requests."""
        flight = self._flights.popleft()
        try:
            result = flight.pending.wait()
        except Exception as error:  # as in `_submit`
            self._step_failed(flight.plan.reqs, error)
            return
        plan, outs = flight.plan, list[TokensOut]()
        self.state.step_done(flight.batch, result.stats, (req.steps for req in plan.decoding))
        tokens = result.token_ids.tolist()
        starts = [0, *result.accept_lens.cumsum().tolist()]
        self._apply_extend(plan.chunks, result, tokens, starts, outs)
        if plan.decoding:
            self._apply_decode(plan.decoding, result, tokens, starts[len(plan.chunks) :], outs)
        if outs:
            self._send(TokensOutBatch(outs=outs))

    def _apply_extend(self, chunks: list[Chunk], result: BatchResult, tokens: list[int], starts: list[int], outs: list[TokensOut]) -> None:
        """`starts`: where the tokens of each chunk's request begin."""
        for index, chunk in enumerate(chunks):
            start, at = starts[index], starts[index + 1]
            req = chunk.req
            if not req.alive:
                continue
            req.kv_len = chunk.end
            collect_prompt_logprobs(chunk, index, result)
            if not chunk.is_last:
                continue
            req.emits_in_flight -= 1
            self._emit(req, tokens[start:at], start, result, outs)
            if req.holding is not None:
                self.ledger.publish(req.holding, req.ids, req.kv_len)

    def _apply_decode(self, reqs: list[Req], result: BatchResult, tokens: list[int], starts: list[int], outs: list[TokensOut]) -> None:
        """`starts`: where the tokens of each request begin, and where those of the last one end."""
        self.state.spec.paused_steps += self.limits.max_accept_len > 1 and not result.stats.draft_tokens
        for req, (start, at) in zip(reqs, pairwise(starts), strict=True):
            count = at - start
            if not req.alive:
                continue
            req.kv_len += count
            req.emits_in_flight -= 1
            req.decodes_in_flight -= 1
            if result.stats.draft_tokens:
                self._count_drafts(req, count, result.stats.draft_tokens)
            self._emit(req, tokens[start:at], start, result, outs)
        self._outlook = self._outlook.after_decode()

    def _count_drafts(self, req: Req, accept_len: int, draft_tokens: int) -> None:
        req.spec = req.spec or SpecTally()
        for tally in (req.spec, self.state.spec):
            tally.add(accept_len, draft_tokens, self.limits.max_accept_len)

    def _emit(self, req: Req, tokens: list[int], start: int, result: BatchResult, outs: list[TokensOut]) -> None:
        """Commit tokens, entries `start`.. of the step's result, and add to `outs` what the reader of `req` is owed now."""
        before = req.length
        finish = req.commit(tokens)
        kept = req.length - before
        self.state.generation_tokens_total += kept
        if req.source.top_logprobs >= 0 and result.logprobs is not None:
            req.logprobs.add(result.logprobs, start, start + kept, req.source.top_logprobs)
        if finish is not None:
            outs.append(self._end(req, finish))
        elif is_due(req, self._config.stream_interval):
            outs.append(token_out(req, None))

    # ---- endings

    def _end(self, req: Req, finish: Finish, keep: bool = True) -> TokensOut:
        """The last message of a request; its row and pages are free from here on."""
        self._release(req, keep)
        req.end(finish)
        self.state.num_aborted_requests_total += finish.reason == "abort"
        return token_out(req, finish)

    def _release(self, req: Req, keep: bool) -> None:
        """Forget a request, wherever it is."""
        del self._reqs[req.rid]
        if req.phase is Phase.WAITING:
            self.queue.remove(req)
        else:
            self._give_back(req, keep)

    def _give_back(self, req: Req, keep: bool) -> None:
        """Free the row and pages; with `keep`, what is known of its KV stays in the prefix cache.

        A step in flight may still write there; it does so before any step that is submitted from now on, and only past `kv_len`.
        """
        assert req.holding is not None
        self.ledger.close(req.holding, req.ids, min(req.kv_len, req.length - 1) if keep else 0)
        self.running.remove(req)
        self._free_rows.append(req.row)

    def _step_failed(self, reqs: Sequence[Req], error: Exception) -> None:
        """Answer the requests of a failed step; raise when that was one too many."""
        log.error("a forward step failed", exc_info=error)
        finish = failure(StepFailed())
        outs = [self._end(req, finish, keep=False) for req in reqs if req.alive]
        if outs:
            self._send(TokensOutBatch(outs=outs))
        self.state.num_failed_steps_total += 1
        now = self._clock()
        self._failures.append(now)
        while now - self._failures[0] > FAILURE_WINDOW:
            self._failures.popleft()
        if len(self._failures) > FAILURES_ALLOWED:
            raise RuntimeError(f"{len(self._failures)} steps failed within {FAILURE_WINDOW:.0f} s") from error

    # ---- what is so

    def gauges(self) -> Gauges:
        """Counts of this moment."""
        ledger = self.ledger
        return Gauges(
            num_running_reqs=len(self.running),
            num_queue_reqs=len(self.queue),
            pages_used=ledger.used,
            pages_total=ledger.num_pages,
            pages_free=ledger.available,
            tokens_used=ledger.used * ledger.page_size,
            max_total_num_tokens=self.limits.max_total_tokens,
        )

    def heartbeat(self) -> Heartbeat:
        """Alive, with the state as JSON; called from the pulse's thread, reads only."""
        self._beats += 1
        return Heartbeat(who="scheduler", count=self._beats, state=msgspec.json.encode(self._figures()))

    def _figures(self) -> dict[str, object]:
        return {**self.state.as_json(self.gauges()), "startup_seconds": self._startup_seconds}
