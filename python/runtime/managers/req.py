"""One request's life in the scheduler: its tokens, its lengths, and when it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from runtime.batch import Int32, Logprobs, RowInit
from runtime.managers.messages import Finish, GenerateReq, TokenLogprobs
from runtime.managers.telemetry.spec_stats import SpecTally
from runtime.managers.telemetry.step_stats import StepTally
from runtime.mem_cache.kv_page_manager import Holding


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # no row, no pages
    PREFILLING = "prefilling"  # has both; some of its tokens are not submitted yet
    DECODING = "decoding"  # all its known tokens are submitted
    ENDED = "ended"  # has neither again


@dataclass(slots=True)
class LogprobRun:
    """Log-probabilities not sent yet, token after token."""

    chosen: list[float | None] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, logprobs: Logprobs, start: int, stop: int, k: int) -> None:
        """Append entries `start` to `stop` with the `k` most likely of each."""
        self.chosen.extend(logprobs.chosen[start:stop].tolist())
        ids, values = logprobs.top_ids[start:stop, :k].tolist(), logprobs.top[start:stop, :k].tolist()
        self.top.extend(list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True))

    def take(self) -> TokenLogprobs:
        """All of them, as a message; none are left."""
        out = TokenLogprobs(chosen=self.chosen, top=self.top)
        self.chosen, self.top = [], []
        return out


class Req:
    """One request.

    Lengths: of the `length` tokens known to the host (prompt and output), `kv_len` have KV that is committed and read back; `submitted` are
    prompt positions given to the worker (after a retraction the output so far counts as prompt); `kv_bound` is what the KV length can at
    most be once everything in flight has run.

    Attributes:
        seq: order of arrival.
        total_limit: tokens at which it ends by length.
        stop_ids: tokens that end it.
        fill_len: tokens to prefill: the prompt, after a retraction also the output so far.
        decodes_in_flight, emits_in_flight: steps submitted and not read that decode it; that emit at least one token of it.
    """

    __slots__ = (
        "_ids",
        "arrived",
        "cached_tokens",
        "decodes_in_flight",
        "emits_in_flight",
        "fill_len",
        "finish",
        "holding",
        "kv_len",
        "length",
        "logprobs",
        "phase",
        "prompt_len",
        "prompt_logprobs",
        "queue_seconds",
        "retracted",
        "row",
        "sent",
        "seq",
        "source",
        "spec",
        "steps",
        "stop_ids",
        "submitted",
        "total_limit",
    )

    def __init__(self, source: GenerateReq, seq: int, eos_ids: tuple[int, ...], max_context_len: int, arrived: float) -> None:
        sampling = source.sampling
        self.source = source
        self.seq = seq
        self.arrived = arrived
        self.prompt_len = self.length = self.fill_len = len(source.input_ids)
        self.total_limit = min(self.prompt_len + sampling.max_new_tokens, max_context_len)
        self._ids: Int32 = np.empty(max(self.total_limit, self.prompt_len), dtype=np.int32)
        self._ids[: self.prompt_len] = source.input_ids
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))
        self.phase = Phase.WAITING
        self.row = 0
        self.holding: Holding | None = None
        self.kv_len = self.submitted = 0
        self.decodes_in_flight = self.emits_in_flight = 0
        self.retracted = False
        self.finish: Finish | None = None
        self.sent = self.prompt_len  # tokens the detokenizer has, the prompt counted
        self.cached_tokens = 0
        self.queue_seconds: float | None = None
        self.logprobs = LogprobRun()
        self.prompt_logprobs: LogprobRun | None = LogprobRun() if source.prompt_logprobs else None
        self.spec: SpecTally | None = None
        self.steps = StepTally()

    # ---- what the policy and the batches read

    @property
    def rid(self) -> str:
        """The name it came under."""
        return self.source.rid

    @property
    def ids(self) -> Int32:
        """int32 [length]: prompt and output so far."""
        return self._ids[: self.length]

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far."""
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self.total_limit - self.length

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.phase is not Phase.ENDED

    @property
    def needs_decode(self) -> bool:
        """Whether one more decode step can be of use: what is in flight does not surely reach the length limit."""
        return self.phase is Phase.DECODING and self.emits_in_flight < self.remaining

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are still to be collected; cached prefixes have none."""
        return self.prompt_logprobs is not None and self.completion_tokens == 0

    def kv_bound(self, max_accept_len: int) -> int:
        """The largest the KV length can be once everything in flight has run; exact while prefilling."""
        return max(self.kv_len, self.submitted) + self.decodes_in_flight * max_accept_len

    def row_init(self, needs_history: bool) -> RowInit:
        """What the worker must know of this request in its row; all its tokens where it `needs_history`."""
        sampling = self.source.sampling
        return RowInit(
            row=self.row,
            prompt_len=self.prompt_len,
            sampling=sampling,
            seed=self.source.seed,
            eos_ids=np.array(sorted(self.stop_ids), dtype=np.int32),
            history=self.ids.copy() if sampling.penalised or needs_history else None,
        )

    # ---- what happens to it

    def begin(self, row: int, holding: Holding, prefix_len: int, now: float) -> None:
        """It has a row and pages; `prefix_len` of its tokens have KV already."""
        self.phase, self.row, self.holding, self.retracted = Phase.PREFILLING, row, holding, False
        self.kv_len = self.submitted = prefix_len
        self.fill_len = self.length
        if self.queue_seconds is None:
            self.queue_seconds, self.cached_tokens = now - self.arrived, prefix_len
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = LogprobRun()

    def suspend(self) -> None:
        """It was retracted: it has neither row nor pages, keeps its output, and waits."""
        assert self.emits_in_flight == self.decodes_in_flight == 0, "retracted with a step in flight"
        self.phase, self.row, self.holding, self.retracted = Phase.WAITING, 0, None, True
        self.kv_len = self.submitted = 0

    def end(self, finish: Finish | None) -> None:
        """It is over; None if nobody is to be told why."""
        self.phase, self.row, self.holding, self.finish = Phase.ENDED, 0, None, finish

    def commit(self, tokens: list[int]) -> Finish | None:
        """Append the tokens of one step until one ends the request; those after it are dropped."""
        for token in tokens:
            self._ids[self.length] = token
            self.length += 1
            finish = self._ending(token)
            if finish is not None:
                return finish
        return None

    def _ending(self, token: int) -> Finish | None:
        if token in self.stop_ids and self.completion_tokens > self.source.sampling.min_new_tokens:
            return Finish(reason="stop", matched=token)
        return Finish(reason="length") if self.length >= self.total_limit else None
