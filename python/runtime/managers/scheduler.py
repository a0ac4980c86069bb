"""The scheduler's loop: receive messages, plan a step, submit it, collect results."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import structs

from runtime.batch import BatchResult, Int32, Logprobs, Pending, Worker
from runtime.config.runtime_config import CacheConfig, SchedulerConfig
from runtime.constrained.compiler import GrammarCompiler
from runtime.errors import (
    CacheBusy,
    GrammarError,
    QueueFull,
    QueueTimeout,
    RequestError,
    RequestTimeout,
    ServerDraining,
    ServerFault,
    ServingError,
    StepFailed,
)
from runtime.managers import schedule_policy as policy
from runtime.managers.admission import Admission
from runtime.managers.attention_groups import AttentionGroups
from runtime.managers.common_pages import CommonPages
from runtime.managers.decode_counts import count_decodes
from runtime.managers.grammar_queue import GrammarQueue
from runtime.managers.messages import (
    AbortReq,
    CacheFlushed,
    CallFailed,
    ControlReply,
    ControlReq,
    DrainReq,
    Finish,
    GenerateReq,
    Heartbeat,
    ProfileAt,
    StopReq,
    ToDetokenizer,
    TokensOut,
    TokensOutBatch,
    ToScheduler,
)
from runtime.managers.replies import collect_pooled, collect_prompt_logprobs, failure, refusal, request_info, tokens_out
from runtime.managers.req import Phase, Req
from runtime.managers.step_plan import StepPlan
from runtime.managers.telemetry.heartbeat import HeartbeatThread
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.spec_stats import no_drafts
from runtime.managers.telemetry.stats_log import StatsLog

log = logging.getLogger(__name__)

IDLE_WAIT = 0.5
"""Seconds to wait for a message when there is nothing to do."""
COMPILE_WAIT = 0.002
"""Seconds to wait for a message when there is nothing to do except wait for a grammar."""
FAILURES_ALLOWED = 2
FAILURE_WINDOW = 60.0
"""The process ends when more than `FAILURES_ALLOWED` steps fail within this many seconds."""


class Scheduler:
    """Decides what the worker runs, and sends the results to the detokenizer.

    With overlap, step n + 1 is submitted before step n is read; when a step is planned, at most one other is in flight.

    Args:
        config: the scheduler's options.
        cache: whether prefixes are cached.
        worker: runs the steps.
        eos_ids: tokens that end a text.
        receive: returns the next message, or None if none comes within the given seconds.
        send: sends a message to the detokenizer. Any thread may call it. It must encode the message before it returns.
        clock: monotonic seconds.
        compiler: compiles the grammars of requests; None if the server has no grammar backend.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        worker: Worker,
        eos_ids: tuple[int, ...],
        receive: Callable[[float], ToScheduler | None],
        send: Callable[[ToDetokenizer], None],
        clock: Callable[[], float] = time.monotonic,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self._config = config
        self._worker, self._eos_ids = worker, eos_ids
        self._receive, self._send, self._clock = receive, send, clock
        self.limits = worker.limits
        self.stats = SchedulerStats(startup_seconds=worker.info().startup_seconds)
        groups = [Admission(config, cache.radix_cache, self.limits, self.stats, clock) for _ in range(self.limits.groups)]
        self.groups = AttentionGroups(groups, config.max_queued_requests, self.limits)
        self._grammars = GrammarQueue(compiler)
        self._stats_log = StatsLog(self.current_stats, clock())
        self._reqs: dict[str, Req] = {}
        self._in_flight: deque[tuple[list[StepPlan], Pending]] = deque()  # submitted steps, not read yet, with a plan for each group
        self._common_pages = CommonPages()
        self._overlap = self.limits.overlap and config.overlap
        self._prompt_tokens = 0  # run since the last decode step
        self._draining = False
        self._failures: deque[float] = deque()
        self._replies: list[TokensOut] = []
        self._arrivals = self._steps = self._iterations = 0

    # ---- the loop

    def run(self) -> None:
        """Serve until drained. Raises `RuntimeError` from the worker's error if steps fail repeatedly."""
        with HeartbeatThread(lambda: self._send(self.heartbeat()), lambda: self._iterations, self._config.watchdog_timeout):
            while not self.drained:
                self.step(IDLE_WAIT)
        self._send(DrainReq())

    @property
    def drained(self) -> bool:
        """Whether the scheduler was told to shut down and has nothing left to do."""
        return self._draining and self.idle

    @property
    def idle(self) -> bool:
        """Whether no request is alive and no step is in flight."""
        return not self._reqs and not self._in_flight

    @property
    def steps_in_flight(self) -> int:
        """Steps that were submitted and not read yet."""
        return len(self._in_flight)

    def step(self, wait: float = 0.0) -> None:
        """One iteration of the loop; an idle scheduler waits up to `wait` seconds for a message."""
        self._iterations += 1
        self._receive_all(self._wait_seconds(wait))
        self._queue_compiled()
        self._expire()
        plans = self._plan()
        overlaps = bool(plans) and self._submit(plans) and self._overlap
        while len(self._in_flight) > overlaps:
            self._collect()
        self._stats_log.tick(self._clock())

    # ---- receiving

    def _wait_seconds(self, wait: float) -> float:
        """Seconds to wait for a message: `wait` if there is nothing else to do."""
        if self.idle:
            return wait
        only_compiling = len(self._grammars) >= len(self._reqs) and not self._in_flight
        return min(wait, COMPILE_WAIT) if only_compiling else 0.0

    def _receive_all(self, wait: float) -> None:
        message = self._receive(wait)
        while message is not None:
            self._handle(message)
            message = self._receive(0.0)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case GenerateReq():
                prompt = np.array(message.input_ids, dtype=np.int32)  # shared by its samples
                for request in message.samples():
                    self._enqueue(request, prompt)
            case AbortReq():
                one = self._reqs.get(message.rid)
                reqs = list(self._reqs.values()) if message.all else [one] if one is not None else []
                self._end_all(reqs, Finish(reason="abort", message="The request was aborted."))
            case StopReq():
                if (req := self._reqs.pop(message.rid, None)) is not None:
                    self.groups.of(req).remove(req, keep=True)
            case ControlReq():
                self._send(ControlReply(call_id=message.call_id, result=self._control(message)))
            case DrainReq():
                self._draining = True

    def _enqueue(self, request: GenerateReq, prompt: Int32) -> None:
        """Queue a request, first for its grammar if it has one, or refuse it. prompt: int32, its tokens."""
        if request.rid in self._reqs:
            log.error("dropped a second request named %s while the first is running", request.rid[:80])
            return
        self.stats.num_requests_total += 1
        self._send(request_info(request))
        try:
            if self._draining:
                raise ServerDraining()
            policy.check_memory(request, self.limits)
            if (grammar := request.sampling.grammar) is not None:
                self._grammars.check(grammar)
            if self.groups.queue_is_full or len(self._grammars) >= self._config.max_queued_requests:
                raise QueueFull(self._config.max_queued_requests)
        except ServingError as error:
            self.stats.num_aborted_requests_total += 1
            self._replies.append(refusal(request, error))
            self._send_replies()
            return
        self._arrivals += 1
        req = Req(request, prompt, self._arrivals, self._eos_ids, self.limits.max_context_len, self._clock(), self._config.stream_interval)
        self._reqs[request.rid] = req
        if grammar is None:
            self.groups.place(req)
        else:
            self._grammars.add(req, grammar)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar is compiled, and refuse those whose grammar cannot be used."""
        if not len(self._grammars):
            return
        for req, error in self._grammars.take():
            if error is None:
                self.groups.place(req)
            else:
                self._end(req, failure(error))
        self._send_replies()

    def _control(self, message: ControlReq) -> SchedulerStats | CacheFlushed | ProfileAt | CallFailed:
        try:
            return self._perform(message)
        except RequestError as error:
            return CallFailed(message=str(error), status=error.status, code=error.code, param=error.param)
        except Exception as error:  # an administrative call must not end the process
            log.exception("%s failed", message.what)
            return CallFailed(message=str(error))

    def _perform(self, message: ControlReq) -> SchedulerStats | CacheFlushed | ProfileAt:
        match message.what:
            case "stats":
                return structs.replace(self.current_stats(), worker=self._worker.info())
            case "flush_cache":
                return CacheFlushed(pages=self._flush_cache())
            case "change_speculation":
                self._worker.change_speculation(message.speculation)
                return self.current_stats()
            case "start_profile":
                self._worker.start_profile(message.folder)
                return ProfileAt(path=message.folder)
            case "stop_profile":
                return ProfileAt(path=self._worker.stop_profile())

    def _flush_cache(self) -> int:
        if self._reqs:
            raise CacheBusy(len(self._reqs))
        while self._in_flight:  # steps whose requests have all ended
            self._collect()
        self.stats.spec_by_context = no_drafts()
        self._stats_log = StatsLog(self.current_stats, self._clock())
        return self.groups.flush()

    def _expire(self) -> None:
        """End the requests that wait or run for longer than the time-outs allow."""
        waits, runs, now = self._config.queue_timeout, self._config.request_timeout, self._clock()
        if waits is not None:
            late = [req for req in self._reqs.values() if not req.was_admitted and now - req.arrived > waits]
            self._end_all(late, failure(QueueTimeout(waits)))
        if runs is not None:
            self._end_all([req for req in self._reqs.values() if now - req.arrived > runs], failure(RequestTimeout(runs)))

    # ---- planning

    def _plan(self) -> list[StepPlan]:
        """The next step by group, or []. Prompts go first, but at most `max_prefill_tokens` prompt tokens run between two decode steps."""
        while self.groups.wants_retraction and self._in_flight:
            self._collect()
        self.groups.retract_for_waiting()
        starving = self._prompt_tokens >= self._config.max_prefill_tokens and any(group.decoding for group in self.groups)
        return ([] if starving else self.groups.plan_prompts()) or self._plan_decode()

    def _plan_decode(self) -> list[StepPlan]:
        """One decode step of all requests; if pages do not suffice, some are retracted. [] if no request decodes."""
        plans = [self._plan_group_decode(group) for group in self.groups]
        if len(plans) > 1:  # results that one group waited for may have ended requests of another
            for plan in plans:
                plan.decodes = [req for req in plan.decodes if req.alive]
        return plans if any(plan.decodes for plan in plans) else []

    def _plan_group_decode(self, group: Admission) -> StepPlan:
        plan = StepPlan()
        while not group.add_decodes(plan, group.decoding):
            if self._in_flight:
                self._collect()  # its results may end requests and free their pages
            else:
                group.retract_youngest()
        return plan

    # ---- submitting

    def _submit(self, plans: list[StepPlan]) -> bool:
        """Hand the step to the worker; False if that failed, which ends its requests."""
        self._steps += 1
        batch = StepPlan.batch_of(plans, self._steps)
        if self.limits.shares_prefixes and not batch.num_prompts:
            batch.shared_tokens = self._common_pages.count([req.pages for req in plans[0].decodes]) * self.limits.page_size
        tokens = max(len(section.token_ids) for section in batch.sections or [batch])
        self._prompt_tokens = 0 if any(plan.decodes for plan in plans) else self._prompt_tokens + tokens
        try:
            pending = self._worker.submit(batch)
        except Exception as error:  # `_step_failed` answers the requests, and raises if steps fail repeatedly
            self._step_failed(plans, error)
            return False
        for plan in plans:
            plan.mark_submitted(self.limits.max_accept_len)
        self._in_flight.append((plans, pending))
        return True

    # ---- collecting

    def _collect(self) -> None:
        """Read the oldest step in flight and send its tokens."""
        plans, pending = self._in_flight.popleft()
        try:
            result = pending.wait()
        except Exception as error:  # as in `_submit`
            self._step_failed(plans, error)
            return
        for plan, section in zip(plans, result.sections or [result], strict=True):
            self._apply(plan, section)
        self._send_replies()

    def _apply(self, plan: StepPlan, result: BatchResult) -> None:
        """Apply the results of one group's step to its requests."""
        tokens, starts = result.token_ids.tolist(), [0, *result.accept_lens.cumsum().tolist()]
        for index, (valid, reason) in result.grammar_failures.items():
            req = plan.reqs[index]
            self._emit([req], tokens, (starts[index], starts[index] + valid), result.logprobs)
            if req.alive and (spec := req.request.sampling.grammar) is not None:
                self._end(req, failure(GrammarError(spec.kind, reason)), keep=False)
        if plan.chunks:
            self._apply_chunks(plan, result, tokens, starts)
        if plan.decodes:
            accept_lens = result.accept_lens[len(plan.chunks) :].tolist()
            count_decodes(plan, result.stats, accept_lens, self.limits.max_accept_len, self.stats)
            self._emit(plan.decodes, tokens, starts[len(plan.chunks) :], result.logprobs)
            self.groups.of(plan.decodes[0]).new_token_ratio.decay()

    def _apply_chunks(self, plan: StepPlan, result: BatchResult, tokens: list[int], starts: list[int]) -> None:
        """Apply the results of the prompt chunks; `tokens` and `starts` as in `_emit`."""
        self.stats.extend_steps += 1
        self.stats.mixed_steps += bool(plan.decodes)
        for index, chunk in enumerate(plan.chunks):
            req = chunk.req
            if not req.alive:
                continue
            req.kv_len = chunk.end
            collect_prompt_logprobs(chunk, index, result)
            collect_pooled(chunk, index, result)
            if not chunk.is_last:
                continue
            req.emits_in_flight -= 1
            if req.request.pooling is not None:
                self._end(req, Finish(reason="stop"))
                continue
            if not req.completion_tokens:
                req.progress.prefill_seconds = self._clock() - req.arrived - req.progress.queue_seconds
            self._emit([req], tokens, starts[index : index + 2], result.logprobs)
            if req.alive:
                self.groups.of(req).kv_pages.publish(req.pages, req.ids, req.kv_len)

    def _emit(self, reqs: Sequence[Req], tokens: list[int], starts: Sequence[int], logprobs: Logprobs | None) -> None:
        """Commit the new tokens of `reqs`, and collect the replies that are due. This runs for each request and step, so it makes few
        calls.

        Args:
            tokens: the tokens of the whole step.
            starts: `starts[i]` and `starts[i + 1]` bound the tokens of request i, and their entries in `logprobs`.
        """
        ended, dropped, replies = Phase.ENDED, 0, self._replies
        for req, start, stop in zip(reqs, starts[:-1], starts[1:], strict=True):
            if req.phase is ended:
                dropped += stop - start
                continue
            emitted = tokens[start:stop]
            finish = req.commit(emitted)
            if logprobs is not None and req.top_logprobs >= 0:
                req.logprobs.add(logprobs, start, start + len(emitted), req.top_logprobs)
            if finish is not None:
                dropped += stop - start - len(emitted)
                self._end(req, finish)
            elif len(req.unsent) >= req.reply_at:
                replies.append(tokens_out(req, None))
        self.stats.generation_tokens_total += starts[-1] - starts[0] - dropped

    def _send_replies(self) -> None:
        """Send the replies collected since the last call."""
        if self._replies:
            self._send(TokensOutBatch(outs=self._replies))
            self._replies = []

    # ---- endings

    def _end(self, req: Req, finish: Finish, keep: bool = True) -> None:
        """Free the row and pages of `req`, and send its last reply; with `keep`, its committed KV stays cached."""
        del self._reqs[req.rid]
        self.groups.of(req).remove(req, keep)
        self.stats.num_aborted_requests_total += finish.reason == "abort"
        self._replies.append(tokens_out(req, finish))

    def _end_all(self, reqs: Iterable[Req], finish: Finish, keep: bool = True) -> None:
        for req in reqs:
            if req.alive:
                self._end(req, finish, keep)
        self._send_replies()

    def _step_failed(self, plans: Iterable[StepPlan], error: Exception) -> None:
        """End the requests of a failed step; raise if too many steps failed, or if later steps would fail too."""
        if isinstance(error, ServerFault):
            raise error
        log.error("a forward step failed", exc_info=error)
        self._end_all([req for plan in plans for req in plan.reqs], failure(StepFailed()), keep=False)
        self.stats.num_failed_steps_total += 1
        now = self._clock()
        self._failures.append(now)
        while now - self._failures[0] > FAILURE_WINDOW:
            self._failures.popleft()
        if len(self._failures) > FAILURES_ALLOWED:
            raise RuntimeError(f"{len(self._failures)} steps failed within {FAILURE_WINDOW:.0f} s") from error

    # ---- statistics

    def current_stats(self) -> SchedulerStats:
        """The statistics, after an update of the gauges. Any thread may call it."""
        self.groups.measure(self.stats, len(self._grammars))
        return self.stats

    def heartbeat(self) -> Heartbeat:
        """A heartbeat, with the statistics. Called on the heartbeat thread."""
        return Heartbeat(who="scheduler", stats=self.current_stats())
