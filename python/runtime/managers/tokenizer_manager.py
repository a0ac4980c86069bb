"""Text in, futures out: validates and tokenises requests, hands them to the scheduler and their text back to whoever asked."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from runtime.batch import WorkerLimits
from runtime.config.runtime_config import RuntimeConfig
from runtime.errors import (
    ContextTooLong,
    InvalidField,
    QueueFull,
    RequestError,
    ServerDraining,
    ServingError,
    SlowReader,
    StepFailed,
    WorkerDied,
)
from runtime.managers.messages import (
    AbortReq,
    ControlReply,
    ControlReq,
    DrainReq,
    Finish,
    GenerateReq,
    Heartbeat,
    SpecStats,
    TextOut,
    TextOutBatch,
    TokenLogprobs,
    ToScheduler,
    ToTokenizer,
)
from runtime.managers.telemetry.health import Health
from runtime.managers.telemetry.step_stats import StepTally
from runtime.models.config import ModelConfig
from runtime.sampling_params import MAX_N, MAX_TOP_LOGPROBS, SamplingParams

log = logging.getLogger(__name__)

MAX_UNREAD = 4096
"""Updates that one generation keeps for a reader who lags; more end it."""
LONG_TEXT = 2048
"""Characters from which text is tokenised in a thread, so that the event loop goes on."""
MAX_RID = 256
SEED_MASK = (1 << 63) - 1
_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the seeds of the n choices


class Encoder(Protocol):
    """What the manager needs of a tokenizer. `encode` may run in a thread."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationUpdate:
    """One step of one choice.

    Attributes:
        index: the choice, 0..n - 1.
        text: new text that is safe to show, maybe none.
        token_ids: new tokens; a stop token that ended the choice is among them.
        prompt_tokens, cached_tokens, completion_tokens: counts of this choice so far.
        finish: why the choice ended; exactly one update of each choice has it.
        logprobs, prompt_logprobs: of `token_ids` and of the prompt, where asked for.
        spec: speculation of this choice so far.
        steps: how the decode steps of this choice ran so far.
        queue_seconds: how long the choice waited to be scheduled.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    spec: SpecStats | None = None
    steps: StepTally = field(default_factory=StepTally)
    queue_seconds: float = 0.0


class Observer(Protocol):
    """Told about every choice as it goes; each call is quick and raises nothing."""

    def started(self, prompt_tokens: int) -> None:
        """A choice was sent to the scheduler."""
        ...

    def first_token(self, seconds: float) -> None:
        """Its first tokens came, so long after its arrival."""
        ...

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """More tokens came, so long after the ones before."""
        ...

    def ended(self, seconds: float, update: GenerationUpdate | None) -> None:
        """It ended, so long after its arrival; None when it failed or its client left."""
        ...


@dataclass(slots=True)
class _Choice:
    """One of the n texts of a generation, under its own id on the wire."""

    generation: Generation
    index: int
    arrived: float
    latest: float = 0.0


class Generation:
    """The answer to one request as it grows: an async iterator of `GenerationUpdate`, over once all n choices have finished.

    Iterating raises the `ServingError` that ended the request early. `close()` (or leaving `async with`) tells the scheduler to stop.
    """

    def __init__(self, manager: TokenizerManager, rid: str, call: str, prompt_ids: list[int], n: int) -> None:
        self.rid = rid
        self.call = call
        self.prompt_ids = prompt_ids
        self.n = n
        self.wires: set[str] = set()
        self._manager = manager
        self._unread: deque[GenerationUpdate] = deque()
        self._error: ServingError | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self.wires:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._unread.popleft()

    def close(self) -> None:
        """The client is gone: end what still runs. Harmless when nothing does."""
        self._manager.release(self)

    def put(self, update: GenerationUpdate) -> bool:
        """Keep an update for the reader; False when too many are kept already."""
        if len(self._unread) >= self._manager.max_unread:
            return False
        self._unread.append(update)
        self._news.set()
        return True

    def fail(self, error: ServingError) -> None:
        """End with `error` once what is unread was read."""
        self._error = self._error or error
        self._news.set()


class TokenizerManager:
    """The reader's side of the runtime. Lives in one event loop; only tokenising leaves it.

    Args:
        config: what was decided at start.
        tokenizer: text to tokens.
        model_config: the model served.
        limits: what the worker can hold.
        to_scheduler: sends one message; never blocks.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        tokenizer: Encoder,
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
        self.state: dict[str, object] = {}
        self.observer: Observer | None = None
        self.max_unread = MAX_UNREAD
        self.beats = {"scheduler": 0, "detokenizer": 0}
        self._send = to_scheduler
        self._open: dict[str, _Choice] = {}
        self._named: dict[str, Generation] = {}
        self._calls: dict[str, asyncio.Future[dict[str, object]]] = {}
        self._trace_calls = 0
        self._serial = itertools.count(1)
        self._seeds = random.Random(config.model.random_seed)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_requests(self) -> int:
        """Choices under way."""
        return len(self._open)

    @property
    def draining(self) -> bool:
        """Whether no new work is taken."""
        return self.health.draining

    # ---- requests

    async def generate(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        n: int = 1,
        fill_context: bool = False,
        stream: bool = False,
        top_logprobs: int = -1,
        prompt_logprobs: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        rid: str | None = None,
        call: str = "",
    ) -> Generation:
        """Validate one request and send it off.

        Args:
            prompt: text, or token ids as they are.
            sampling: how to choose tokens; `max_new_tokens` is cut to the room that the context leaves.
            n: how many texts.
            fill_context: generate to the end of the context, whatever `sampling.max_new_tokens` says.
            stream: whether to pass on text as it comes; else each choice gets one update.
            top_logprobs: -1 for no log-probabilities, else how many beside the chosen token's.
            prompt_logprobs: log-probabilities of the prompt too.
            priority: higher goes first, where the policy looks at it.
            cache_salt: separates prefix caches.
            add_special_tokens: whether the tokenizer puts its begin token before a text.
            rid: the request's name for `abort`; drawn when not given.
            call: a name for `abort` that the requests of one call share; empty for none.

        Raises:
            RequestError: a value is out of bounds; `param` names it as `SamplingParams` does.
            QueueFull, ServerDraining, WorkerDied: not now.
        """
        self._check_open()
        self._check_envelope(n, top_logprobs, rid)
        prompt_ids = await self._prompt_ids(prompt, add_special_tokens)
        sampling = self._fitted(sampling, len(prompt_ids), fill_context)
        self._check_open()  # tokenising may have taken a while
        self._check_queue(n)
        name = rid if rid is not None else f"talon-{next(self._serial)}"
        if name in self._named:
            raise InvalidField("rid", name, "unique among the open requests")
        generation = Generation(self, name, call, prompt_ids, n)
        self._named[name] = generation
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        for index in range(n):
            wire = self._register(generation, index)
            self._send(
                GenerateReq(
                    rid=wire,
                    input_ids=prompt_ids,
                    sampling=sampling,
                    seed=(seed + index * _SEED_STRIDE) & SEED_MASK,
                    top_logprobs=top_logprobs,
                    prompt_logprobs=prompt_logprobs,
                    stream=stream,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            )
        return generation

    def abort(self, rid: str = "", *, all: bool = False) -> None:
        """End one request, those of one call, or all: their last update has finish reason "abort". Unknown names are ignored."""
        if all:
            self._send(AbortReq(all=True))
            return
        for generation in self._named.values():
            if rid and rid in (generation.rid, generation.call):
                for wire in generation.wires:
                    self._send(AbortReq(rid=wire))

    def release(self, generation: Generation) -> None:
        """Forget a generation whose reader is gone and stop what still runs of it."""
        for wire in list(generation.wires):
            self._send(AbortReq(rid=wire))
            self._end(wire, None)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; long texts go through a thread."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.tokenizer.encode, text, add_special_tokens)

    # ---- administration

    async def control(self, what: Literal["flush_cache", "state", "start_profile", "stop_profile"], folder: str = "") -> dict[str, object]:
        """One administrative call; returns the scheduler's answer.

        Raises:
            RequestError: the call was at fault, a `ServingError`: the server; with the scheduler's message.
        """
        if not self.health.alive():
            raise WorkerDied(self.health.dead or "scheduler")
        call_id = f"call-{next(self._serial)}"
        self._trace_calls += what == "stop_profile"
        reply: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = reply
        try:
            self._send(ControlReq(call_id=call_id, what=what, folder=folder))
            return await reply
        finally:
            self._calls.pop(call_id, None)
            self._trace_calls -= what == "stop_profile"

    @property
    def writes_trace(self) -> bool:
        """Whether the scheduler was told to end a profile and has not answered: it may be silent meanwhile."""
        return self._trace_calls > 0

    async def drain(self, timeout: float) -> bool:
        """Take no new work and wait for what is open, at most `timeout` seconds; whether all of it ended."""
        self.health.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    def dismiss(self) -> None:
        """Tell the scheduler to exit once it has nothing left to do."""
        self._send(DrainReq())

    def fail_all(self, who: str) -> None:
        """A process is gone: every open request and call ends with `WorkerDied`."""
        self.health.dead = self.health.dead or who
        self.give_up(lambda: WorkerDied(who))

    def give_up(self, error: Callable[[], ServingError]) -> None:
        """Nothing will be answered any more: every open request and call ends with an `error()` of its own."""
        for wire, choice in list(self._open.items()):
            choice.generation.fail(error())
            self._end(wire, None)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error())

    def close(self) -> None:
        """Stop the tokenising threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- what comes back

    def handle(self, message: ToTokenizer) -> None:
        """Take one message from the detokenizer."""
        if isinstance(message, TextOutBatch):
            now = time.monotonic()
            for out in message.outs:
                self._take(out, now)
        elif isinstance(message, ControlReply):
            self._answer(message)
        else:
            self._hear(message)

    def _hear(self, beat: Heartbeat) -> None:
        self.beats[beat.who] += 1
        if beat.who == "scheduler":
            self.state = msgspec.json.decode(beat.state, type=dict[str, object])

    def _take(self, out: TextOut, now: float) -> None:
        choice = self._open.get(out.rid)
        if choice is None:
            return  # ended here already
        finish = out.finish
        if finish is not None and finish.reason == "abort" and finish.status >= 400:
            choice.generation.fail(_error_of(finish))
            self._end(out.rid, None)
            self.release(choice.generation)
            return
        update = _update(choice.index, out)
        self._observe(choice, update, now)
        if not choice.generation.put(update):
            choice.generation.fail(SlowReader(self.max_unread))
            self.release(choice.generation)
        elif finish is not None:
            self._end(out.rid, update)

    def _answer(self, message: ControlReply) -> None:
        reply = self._calls.get(message.call_id)
        if reply is None or reply.done():
            return
        if message.ok:
            reply.set_result(msgspec.json.decode(message.body, type=dict[str, object]))
        else:
            reply.set_exception((RequestError if message.refused else ServingError)(message.error))

    # ---- bookkeeping

    def _register(self, generation: Generation, index: int) -> str:
        wire = str(next(self._serial))
        self._open[wire] = _Choice(generation, index, time.monotonic())
        generation.wires.add(wire)
        self._idle.clear()
        if self.observer is not None:
            self.observer.started(len(generation.prompt_ids))
        return wire

    def _end(self, wire: str, update: GenerationUpdate | None) -> None:
        choice = self._open.pop(wire, None)
        if choice is None:
            return
        generation = choice.generation
        generation.wires.discard(wire)
        if not generation.wires:
            self._named.pop(generation.rid, None)
        if not self._open:
            self._idle.set()
        seconds = time.monotonic() - choice.arrived
        if self.observer is not None:
            self.observer.ended(seconds, update)
        if self.config.server.log_requests:
            _log_request(generation, choice, update, seconds)

    def _observe(self, choice: _Choice, update: GenerationUpdate, now: float) -> None:
        if self.observer is not None and update.token_ids:
            if choice.latest == 0.0:
                self.observer.first_token(now - choice.arrived)
            else:
                self.observer.next_tokens(now - choice.latest, len(update.token_ids))
        if update.token_ids:
            choice.latest = now

    # ---- validation

    def _check_open(self) -> None:
        if self.health.dead is not None:
            raise WorkerDied(self.health.dead)
        if self.draining:
            raise ServerDraining

    def _check_queue(self, n: int) -> None:
        waiting = max(0, len(self._open) - self.limits.max_running_requests)
        room = self.limits.max_running_requests + self.config.scheduler.max_queued_requests - len(self._open)
        if waiting >= self.config.scheduler.max_queued_requests or n > room:
            raise QueueFull(self.config.scheduler.max_queued_requests)

    def _check_envelope(self, n: int, top_logprobs: int, rid: str | None) -> None:
        if type(n) is not int or not 1 <= n <= MAX_N:
            raise InvalidField("n", n, f"an integer between 1 and {MAX_N}")
        if type(top_logprobs) is not int or not -1 <= top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidField("top_logprobs", top_logprobs, f"an integer between 0 and {MAX_TOP_LOGPROBS}")
        if rid is not None and not 1 <= len(rid) <= MAX_RID:
            raise InvalidField("rid", rid, f"a string of 1 to {MAX_RID} characters")

    async def _prompt_ids(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        ids = await self.tokenize(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidField("prompt", 0, "at least 1", subject="The number of prompt tokens")
        if len(ids) >= self.max_context_len:
            raise ContextTooLong(len(ids), self.max_context_len)
        _check_ids(ids, self.model_config.vocab_size)
        return ids

    @property
    def max_context_len(self) -> int:
        """Prompt and output tokens of one request, together: the context, or less where KV holds less."""
        return min(self.config.model.context_length, self.limits.max_request_len)

    def _fitted(self, sampling: SamplingParams, prompt_len: int, fill_context: bool) -> SamplingParams:
        """`sampling` with its length cut to the room left, checked."""
        room = self.max_context_len - prompt_len
        if fill_context:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        sampling.check(self.model_config.vocab_size)
        if sampling.max_new_tokens > self.max_context_len:
            limit = f"at most {self.max_context_len}, the context length"
            raise InvalidField("max_new_tokens", sampling.max_new_tokens, limit, subject="The number of output tokens")
        if sampling.max_new_tokens > room:
            shortest = min(sampling.min_new_tokens, room)
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room, min_new_tokens=shortest)
        return sampling


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidField("input_ids", token, f"an integer between 0 and {vocab_size - 1}", subject="A token id")


def _update(index: int, out: TextOut) -> GenerationUpdate:
    return GenerationUpdate(
        index=index,
        text=out.text,
        token_ids=out.token_ids,
        prompt_tokens=out.prompt_tokens,
        cached_tokens=out.cached_tokens,
        completion_tokens=out.completion_tokens,
        finish=out.finish,
        logprobs=out.logprobs,
        prompt_logprobs=out.prompt_logprobs,
        spec=out.spec,
        steps=out.steps,
        queue_seconds=out.queue_seconds,
    )


def _error_of(finish: Finish) -> ServingError:
    """The error that a scheduler's abort stands for."""
    error = RequestError(finish.message) if finish.status < 500 else StepFailed(finish.message)
    error.status = finish.status
    if finish.status == QueueFull.status:
        error.kind, error.retry_after = QueueFull.kind, QueueFull.retry_after
    return error


def _log_request(generation: Generation, choice: _Choice, update: GenerationUpdate | None, seconds: float) -> None:
    name = generation.rid.encode("unicode_escape").decode()  # the client's own words: a line feed in them would begin a line of the log
    if update is None or update.finish is None:
        log.info("%s[%d]: ended early after %.2f s", name, choice.index, seconds)
        return
    log.info(
        "%s[%d]: %d prompt tokens (%d cached), %d new, %s, %.2f s, queued %.2f s",
        name,
        choice.index,
        update.prompt_tokens,
        update.cached_tokens,
        update.completion_tokens,
        update.finish.reason,
        seconds,
        update.queue_seconds,
    )
