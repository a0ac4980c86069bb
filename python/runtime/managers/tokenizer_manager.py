"""The tokenizer manager: tokenises requests, sends them to the scheduler, and routes the text back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from runtime.batch import UNCHANGED, SpeculationChange, WorkerLimits
from runtime.config.runtime_config import RuntimeConfig
from runtime.errors import InvalidField, ServerDraining, ServingError, SlowReader, WorkerDied
from runtime.managers.cost import CallCost
from runtime.managers.generation import NO_OPTIONS, Generation, RequestOptions
from runtime.managers.messages import (
    AbortReq,
    AnswerOptions,
    CacheFlushed,
    CallFailed,
    ControlCall,
    ControlReply,
    ControlReq,
    DrainReq,
    Finish,
    GenerateReq,
    Heartbeat,
    ProfileAt,
    Sample,
    TextOut,
    TextOutBatch,
    ToScheduler,
    ToTokenizer,
)
from runtime.managers.observers.metrics import Metrics
from runtime.managers.observers.request_end import RequestEnd
from runtime.managers.observers.request_log import log_request, log_slow_request
from runtime.managers.prompt_encoder import PromptEncoder
from runtime.managers.queue_capacity import QueueCapacity
from runtime.managers.remote_errors import call_failure, request_failure
from runtime.managers.request_context import CURRENT_CLIENT
from runtime.managers.request_limits import RequestLimits
from runtime.managers.telemetry.health import Health
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.models.config import ModelConfig
from runtime.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
R = TypeVar("R")

MAX_UNREAD = 4096
"""Messages that a generation keeps for a slow reader; one more message ends it."""
SEED_MASK = (1 << 63) - 1
_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the seeds of the n choices


@dataclass(slots=True)
class _Choice:
    """One of the n texts of a generation; each is a separate request in the scheduler."""

    generation: Generation
    index: int
    arrived: float
    progress: Progress
    latest: float = 0.0


class TokenizerManager:
    """The client side of the engine. It belongs to one event loop.

    Args:
        config: the server's configuration.
        tokenizer: text to tokens; must be thread-safe.
        model_config: the model served.
        limits: the worker's limits.
        to_scheduler: sends one message; never blocks.
        health: the state that `/health` and `/ready` report.

    Attributes:
        stats: the statistics in the scheduler's latest heartbeat; None before the first.
        beats: heartbeats received, by process.
        encoder: turns prompts into token ids.
        observer: receives the events of every choice.
        charge: counts tokens of prompts and outputs against the quota of a client, by its name.
        on_end: called with the end of every choice.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        tokenizer: Tokenizer,
        model_config: ModelConfig,
        limits: WorkerLimits,
        to_scheduler: Callable[[ToScheduler], None],
        health: Health | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.limits = limits
        self.health = health or Health()
        self.stats: SchedulerStats | None = None
        self.observer: Metrics | None = None
        self.charge: Callable[[str, int], None] = lambda client, tokens: None
        self.on_end: list[Callable[[RequestEnd], None]] = [log_request] if config.server.log_requests else []
        if (slow := config.server.log_slow_requests) is not None:
            self.on_end.append(partial(log_slow_request, slow))
        self.max_unread = MAX_UNREAD
        self.beats = {"scheduler": 0, "detokenizer": 0}
        self._send = to_scheduler
        self._open: dict[str, _Choice] = {}
        self._released: dict[str, _Choice] = {}
        self._named: dict[str, Generation] = {}
        self._calls: dict[str, asyncio.Future[SchedulerStats | CacheFlushed | ProfileAt | CallFailed]] = {}
        self._trace_calls = 0
        self._serial = itertools.count(1)
        self._seeds = random.Random(config.model.random_seed)
        self.encoder = PromptEncoder(tokenizer, self.max_context_len, config.scheduler.max_queued_tokens)
        scheduler = config.scheduler
        self._capacity = QueueCapacity(
            limits.server_requests, scheduler.max_queued_requests, limits.server_tokens, scheduler.max_queued_tokens
        )
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_requests(self) -> int:
        """Number of unfinished choices."""
        return len(self._open)

    @property
    def unread_messages(self) -> int:
        """Number of messages that handlers have not read yet."""
        return sum(generation.unread for generation in self._named.values())

    @property
    def max_context_len(self) -> int:
        """Prompt and output tokens of one request together: the context length, or less if the KV cache is smaller."""
        return min(self.config.model.context_length, self.limits.max_request_len)

    # ---- requests

    async def generate(
        self, prompt: str | list[int], sampling: SamplingParams, options: RequestOptions = NO_OPTIONS, *, rid: str | None = None
    ) -> Generation:
        """Check a request that is a call of its own, and send it to the scheduler. Arguments and errors as of `price` and `submit`.

        Raises:
            QueueFull, QueuedTokensFull, ServerDraining, WorkerDied: the server cannot take the request now.
        """
        cost = self.new_cost()
        prompt_ids, sampling = await self.price(cost, prompt, sampling, options)
        self.check_capacity(cost)
        return self.submit(prompt_ids, sampling, options, rid)

    def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, options: RequestOptions, rid: str | None, call: str = ""
    ) -> Generation:
        """Send a request to the scheduler, after `price` and `check_capacity`.

        Args:
            prompt_ids, sampling: what `price` returned.
            rid: the request id for `abort`; generated if None.
            call: an id for `abort` that the requests of one call share; empty for none.

        Raises:
            RequestError: an id that is in use, or labels that the model does not know.
        """
        if options.pooling is not None:
            options.pooling.check(self.model_config.vocab_size)
        name = rid if rid is not None else f"talon-{uuid.uuid4().hex}"
        if name in self._named:
            raise InvalidField("rid", name, "unique among open requests")
        request = self._request(prompt_ids, sampling, options)
        self._send(request)  # first, because encoding fails for text that is not valid UTF-8
        generation = Generation(name, call, prompt_ids, options, self.max_unread, self.release, request.client)
        self._named[name] = generation
        self._register(generation, [request.rid, *(sample.rid for sample in request.more)])
        return generation

    def _request(self, prompt_ids: list[int], sampling: SamplingParams, options: RequestOptions) -> GenerateReq:
        """The message to the scheduler; each of the n samples has its own id and seed."""
        client = CURRENT_CLIENT.get()
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        first, *more = [Sample(str(next(self._serial)), (seed + i * _SEED_STRIDE) & SEED_MASK) for i in range(options.n)]
        return GenerateReq(
            rid=first.rid,
            input_ids=prompt_ids,
            sampling=sampling,
            seed=first.seed,
            client=client.name,
            max_priority=self.config.scheduler.max_priority if client.max_priority is None else client.max_priority,
            more=tuple(more),
            **{name: getattr(options, name) for name in AnswerOptions.__struct_fields__},
        )

    def abort(self, rid: str = "", *, all: bool = False) -> None:
        """Abort one choice, one request, the requests of one call, or all, with finish reason "abort"; unknown names are ignored.

        The names of requests are free at once, although the last updates are still to come.
        """
        if all:
            self._send(AbortReq(all=True))
            self._named.clear()
            return
        if not rid:
            return
        for generation in list(self._named.values()):
            whole = rid in (generation.rid, generation.call)
            if whole:
                del self._named[generation.rid]
            for choice_rid in generation.choice_rids:
                if whole or generation.choice_name(self._open[choice_rid].index) == rid:
                    self._send(AbortReq(rid=choice_rid))

    def release(self, generation: Generation) -> None:
        """Forget a generation that has no reader any more, and abort its unfinished choices."""
        for choice_rid in list(generation.choice_rids):
            self._send(AbortReq(rid=choice_rid))
            self._released[choice_rid] = self._open[choice_rid]
            self._end(choice_rid, None)

    def new_cost(self) -> CallCost:
        """The cost of a call without requests so far."""
        return CallCost(self._capacity.limits(self.config.server.max_logprob_cells))

    async def price(
        self, call_cost: CallCost, prompt: str | list[int], sampling: SamplingParams, options: RequestOptions
    ) -> tuple[list[int], SamplingParams]:
        """Add one request to the cost of its call, before any request of the call is sent.

        Returns:
            The prompt's token ids and the parameters, cut to the context.

        Raises:
            RequestError: a value is out of bounds, or the call costs too much.
        """
        self._check_open()
        prompt_ids = await self.encoder.encode(prompt) if isinstance(prompt, str) else prompt
        limits = RequestLimits(self.model_config.vocab_size, self.max_context_len)
        limits.check_prompt(prompt_ids)
        sampling = limits.fit(sampling, len(prompt_ids), options.fill_context)
        call_cost.add(len(prompt_ids), options.n, sampling, options.top_logprobs, options.prompt_logprobs)
        return prompt_ids, sampling

    def check_capacity(self, cost: CallCost) -> None:
        """Raise an error if a call cannot start now, because the queue is full or the server shuts down."""
        self._check_open()  # tokenising may have taken a while
        self._capacity.check(CURRENT_CLIENT.get().name, cost)

    def _check_open(self) -> None:
        if self.health.dead is not None:
            raise WorkerDied(self.health.dead)
        if self.health.draining:
            raise ServerDraining

    # ---- administration

    async def fetch_stats(self) -> SchedulerStats:
        """The scheduler's current statistics, including its worker's. Raises `ServingError` like every call below."""
        return await self._call("stats", SchedulerStats)

    async def flush_cache(self) -> int:
        """Empty the prefix cache; returns the pages that were in it. Status 409 while requests run."""
        return (await self._call("flush_cache", CacheFlushed)).pages

    async def change_speculation(self, change: SpeculationChange) -> None:
        """Change the depth or the synthetic acceptance of the running server."""
        await self._call("change_speculation", SchedulerStats, speculation=change)

    async def start_profile(self, folder: str) -> None:
        """Start a trace of the scheduler process."""
        await self._call("start_profile", ProfileAt, folder)

    async def stop_profile(self) -> str:
        """End the trace; returns its file."""
        self._trace_calls += 1
        try:
            return (await self._call("stop_profile", ProfileAt)).path
        finally:
            self._trace_calls -= 1

    async def _call(self, what: ControlCall, expected: type[R], folder: str = "", speculation: SpeculationChange = UNCHANGED) -> R:
        """Make one call to the scheduler; raises its error with its status."""
        if self.health.dead is not None:
            raise WorkerDied(self.health.dead)
        call_id = f"call-{next(self._serial)}"
        reply = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(ControlReq(call_id=call_id, what=what, folder=folder, speculation=speculation))
            result = await reply
        finally:
            self._calls.pop(call_id, None)
        if isinstance(result, CallFailed):
            raise call_failure(result)
        assert isinstance(result, expected), f"{what} was answered by {type(result).__name__}"
        return result

    @property
    def writes_trace(self) -> bool:
        """Whether the scheduler is writing a profile; it sends no heartbeats meanwhile."""
        return self._trace_calls > 0

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait up to `timeout` seconds for the open ones; returns whether all of them ended."""
        self.health.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    def drain_scheduler(self) -> None:
        """Tell the scheduler to exit after its last request."""
        self._send(DrainReq())

    def process_died(self, process: str) -> None:
        """Fail every open request and call with `WorkerDied`, because `process` died."""
        self.health.dead = self.health.dead or process
        self.fail_all(lambda: WorkerDied(process))

    def fail_all(self, error: Callable[[], ServingError]) -> None:
        """Fail every open request and call, each with a new `error()`."""
        for choice_rid, choice in list(self._open.items()):
            choice.generation.fail(error())
            self._end(choice_rid, None)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error())

    def close(self) -> None:
        """Stop the tokenising threads."""
        self.encoder.close()

    # ---- replies

    async def serve(self, receive: Callable[[], Awaitable[ToTokenizer]]) -> None:
        """Process messages until cancelled. An unexpected error is logged, fails all open requests and calls, and is raised."""
        try:
            while True:
                self.handle(await receive())
        except Exception:
            log.exception("the tokenizer manager failed")
            self.process_died("tokenizer")
            raise

    def handle(self, message: ToTokenizer) -> None:
        """Process one message of the detokenizer."""
        match message:
            case TextOutBatch():
                now = time.monotonic()
                for out in message.outs:
                    self._deliver(out, now)
            case ControlReply():
                reply = self._calls.get(message.call_id)
                if reply is not None and not reply.done():
                    reply.set_result(message.result)
            case Heartbeat():
                self.beats[message.who] += 1
                self.stats = message.stats or self.stats

    def _deliver(self, out: TextOut, now: float) -> None:
        choice = self._open.get(out.rid)
        if choice is None:
            self._charge_rest(out)
            return
        generation = choice.generation
        out = generation.wanted(out)
        finish, choice.progress = out.finish, out.progress
        if finish is not None and finish.reason == "abort" and finish.status >= 400:
            generation.fail(request_failure(finish))
            self._end(out.rid, None)
            self.release(generation)
            return
        self._observe(choice, out, now)
        if not generation.put(choice.index, out):
            generation.fail(SlowReader(generation.max_unread))
            self.release(generation)
        elif finish is not None:
            self._end(out.rid, finish)

    def _charge_rest(self, out: TextOut) -> None:
        """Charge the client for tokens of a released choice that were not delivered, when its last reply arrives."""
        if out.finish is not None and (choice := self._released.pop(out.rid, None)) is not None:
            out = choice.generation.wanted(out)
            self.charge(choice.generation.client, out.progress.completion_tokens - choice.progress.completion_tokens)

    # ---- open choices

    def _register(self, generation: Generation, choice_rids: list[str]) -> None:
        for index, choice_rid in enumerate(choice_rids):
            self._open[choice_rid] = _Choice(generation, index, time.monotonic(), Progress(len(generation.prompt_ids)))
            if self.observer is not None:
                self.observer.started(len(generation.prompt_ids))
        generation.choice_rids.update(choice_rids)
        self._idle.clear()
        self._capacity.add(generation.client, len(choice_rids), len(generation.prompt_ids))
        self.charge(generation.client, len(generation.prompt_ids))

    def _end(self, choice_rid: str, finish: Finish | None) -> None:
        choice = self._open.pop(choice_rid)
        generation = choice.generation
        generation.choice_rids.discard(choice_rid)
        self._capacity.add(generation.client, -1, 0 if generation.choice_rids else -len(generation.prompt_ids))
        if not generation.choice_rids and self._named.get(generation.rid) is generation:  # after an abort, another may have the name
            del self._named[generation.rid]
        if not self._open:
            self._idle.set()
        self.charge(generation.client, choice.progress.completion_tokens)
        end = RequestEnd(generation, choice.index, finish, choice.progress, choice.arrived, time.monotonic())
        if self.observer is not None:
            self.observer.ended(end.seconds, finish, choice.progress)
        for told in self.on_end:
            told(end)

    def _observe(self, choice: _Choice, out: TextOut, now: float) -> None:
        if not out.token_ids:
            return
        if self.observer is not None:
            if choice.latest == 0.0 and out.finish is not None:
                # A response without streaming arrives long after its first token.
                first = out.progress.queue_seconds + out.progress.prefill_seconds
                self.observer.first_token(first)
                self.observer.next_tokens(max(0.0, now - choice.arrived - first), len(out.token_ids) - 1)
            elif choice.latest == 0.0:
                self.observer.first_token(now - choice.arrived)
            else:
                self.observer.next_tokens(now - choice.latest, len(out.token_ids))
        choice.latest = now
