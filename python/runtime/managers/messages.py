"""Every message between the processes: msgspec structs on msgpack, never pickle.

TokenizerManager --ToScheduler--> Scheduler --ToDetokenizer--> DetokenizerManager --ToTokenizer--> TokenizerManager
                                      ^----------StopReq-----------|
"""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.managers.telemetry.step_stats import StepTally
from runtime.sampling_params import SamplingParams


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=False):
    """Base of all messages: tagged with the class name, decoded by type."""


# ---- to the scheduler


class GenerateReq(Message, frozen=True, kw_only=True):
    """Start one request. `rid` is unique; with `n` > 1 the tokenizer manager sends n of these.

    `top_logprobs` is -1 for no log-probabilities, else how many of the most likely to return beside the chosen one.
    `cache_salt` separates prefix caches: prompts share cached KV only within the same salt.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    seed: int
    top_logprobs: int = -1
    prompt_logprobs: bool = False
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""


class AbortReq(Message, frozen=True, kw_only=True):
    """End a request wherever it is; `all` ends every one."""

    rid: str = ""
    all: bool = False


class StopReq(Message, frozen=True, kw_only=True):
    """The detokenizer found a stop string: generate no further. No reply is owed."""

    rid: str


class ControlReq(Message, frozen=True, kw_only=True):
    """An administrative call, answered by one `ControlReply` of the same `call_id`."""

    call_id: str
    what: Literal["flush_cache", "state", "start_profile", "stop_profile"]
    folder: str = ""


class DrainReq(Message, frozen=True, kw_only=True):
    """Shut down once all requests have ended; the scheduler passes it on and exits 0."""


ToScheduler = GenerateReq | AbortReq | StopReq | ControlReq | DrainReq


# ---- from the scheduler, by way of the detokenizer


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a run of tokens; `top` holds (id, log-probability) pairs for each, most likely first."""

    chosen: list[float | None]
    top: list[list[tuple[int, float]]]


class SpecStats(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation of one request so far: verify steps, drafts verified, drafts accepted, and accepted by draft position."""

    verify_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = []

    @property
    def accept_length(self) -> float:
        """Tokens of a verify step, the bonus included; 0 before the first."""
        return 1.0 + self.accepted_tokens / self.verify_steps if self.verify_steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the drafts that was accepted; 0 before the first."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


FinishReason = Literal["stop", "length", "abort"]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended. `matched` is the stop token id or stop string; for an abort `message` and `status` say why."""

    reason: FinishReason
    matched: int | str | None = None
    message: str = ""
    status: int = 0


class TokensOut(Message, frozen=True, kw_only=True):
    """New tokens of one request. The last one of a request carries `finish`; exactly one does.

    The stop token itself is among `token_ids` when one ended the request (`finish.matched` is then its id).
    `steps` are its decode steps so far.
    """

    rid: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    spec: SpecStats | None = None
    steps: StepTally = msgspec.field(default_factory=StepTally)
    queue_seconds: float = 0.0


class TokensOutBatch(Message, frozen=True, kw_only=True):
    """What one step emitted, all requests together."""

    outs: list[TokensOut]


class RequestInfo(Message, frozen=True, kw_only=True):
    """What the detokenizer must know of a request; the scheduler sends it ahead of the first tokens."""

    rid: str
    stop: tuple[str, ...]
    skip_special_tokens: bool
    stream: bool


class ControlReply(Message, frozen=True, kw_only=True):
    """The answer to a `ControlReq`: JSON in `body`, or an error message; `refused` says that the call was at fault, not the server."""

    call_id: str
    ok: bool
    body: bytes = b"{}"
    error: str = ""
    refused: bool = False


class Heartbeat(Message, frozen=True, kw_only=True):
    """A process is alive: its counter moved. The scheduler's also carries its gauges and counters as JSON."""

    who: Literal["scheduler", "detokenizer"]
    count: int
    state: bytes = b"{}"


ToDetokenizer = RequestInfo | TokensOutBatch | ControlReply | Heartbeat | DrainReq


class TextOut(Message, frozen=True, kw_only=True):
    """`TokensOut` with its text. `text` is the new text that is safe to show: no half character, no possible stop string."""

    rid: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    spec: SpecStats | None = None
    steps: StepTally = msgspec.field(default_factory=StepTally)
    queue_seconds: float = 0.0


class TextOutBatch(Message, frozen=True, kw_only=True):
    """What one step emitted, as text."""

    outs: list[TextOut]


ToTokenizer = TextOutBatch | ControlReply | Heartbeat
