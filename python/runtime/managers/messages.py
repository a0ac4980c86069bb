"""The messages between the processes: msgspec structs encoded as msgpack, never pickle.

TokenizerManager --ToScheduler--> Scheduler --ToDetokenizer--> DetokenizerManager --ToTokenizer--> TokenizerManager
                                      ^----------StopReq-----------|
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from runtime.batch import UNCHANGED, Logprobs, SpeculationChange
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages: tagged with the class name, decoded by type."""


# ---- to the scheduler


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One more text for the prompt of a `GenerateReq`, with its own request id and seed."""

    rid: str
    seed: int


class AnswerOptions(Message, frozen=True, kw_only=True):
    """The options of a request other than its sampling parameters.

    Attributes:
        top_logprobs: -1: no log-probabilities; k >= 0: those of the chosen token and of the k most likely.
        prompt_logprobs: also return log-probabilities of the prompt.
        stream: send text as it is generated; otherwise each choice gets one update.
        priority: higher runs first.
        cache_salt: separates prefix caches; prompts share cached KV only within the same salt.
        continues_prompt: whether the output continues the text of the prompt, so that its leading space is kept.
        running_counts: whether each update, not only the last, carries the counts of decode steps and drafts.
        pooling: how the prompt is reduced; such a request ends with the prompt and generates nothing.
    """

    top_logprobs: int = -1
    prompt_logprobs: bool = False
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""
    continues_prompt: bool = False
    running_counts: bool = False
    pooling: Pooling | None = None


class GenerateReq(AnswerOptions, frozen=True, kw_only=True):
    """Start one request, and one more for each of `more`: n texts of a prompt travel as one message.

    Attributes:
        rid: a unique request id.
        client: the client in the fair queue.
        max_priority: the highest priority that counts against other clients.
        more: the other texts of the same prompt.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    seed: int
    client: str = ""
    max_priority: int = 0
    more: tuple[Sample, ...] = ()

    def samples(self) -> Iterator[GenerateReq]:
        """One request per text; they share the list of token ids."""
        yield msgspec.structs.replace(self, more=())
        for sample in self.more:
            yield msgspec.structs.replace(self, rid=sample.rid, seed=sample.seed, more=())


class AbortReq(Message, frozen=True, kw_only=True):
    """End one request, or all with `all`."""

    rid: str = ""
    all: bool = False


class StopReq(Message, frozen=True, kw_only=True):
    """The detokenizer found a stop string: end the request without a reply."""

    rid: str


ControlCall = Literal["stats", "flush_cache", "change_speculation", "start_profile", "stop_profile"]


class ControlReq(Message, frozen=True, kw_only=True):
    """An administrative call, answered by one `ControlReply` of the same `call_id`."""

    call_id: str
    what: ControlCall
    folder: str = ""
    speculation: SpeculationChange = UNCHANGED


class DrainReq(Message, frozen=True, kw_only=True):
    """Shut down when all requests have ended; the scheduler forwards the message and exits with status 0."""


ToScheduler = GenerateReq | AbortReq | StopReq | ControlReq | DrainReq


# ---- from the scheduler, through the detokenizer


class TokenLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of consecutive tokens; `top` has the most likely tokens at each as (id, log-probability), most likely first."""

    chosen: list[float | None] = []
    top: list[list[tuple[int, float]]] = []

    def add(self, logprobs: Logprobs, start: int, stop: int, k: int) -> None:
        """Append entries `start` to `stop`, each with its `k` most likely tokens."""
        self.chosen.extend(logprobs.chosen[start:stop].tolist())
        ids, values = logprobs.top_ids[start:stop, :k].tolist(), logprobs.top[start:stop, :k].tolist()
        self.top.extend(list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True))
        if stop > start and k and logprobs.top[start:stop, k - 1].min() == -math.inf:  # a grammar allowed fewer than k tokens
            self.top[start - stop :] = [[pair for pair in row if pair[1] > -math.inf] for row in self.top[start - stop :]]

    def extend(self, following: TokenLogprobs) -> None:
        """Append the log-probabilities of the following tokens."""
        self.chosen.extend(following.chosen)
        self.top.extend(following.top)

    @classmethod
    def joined(cls, parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
        """The log-probabilities of consecutive messages as one; None if no message has any."""
        present = [part for part in parts if part is not None]
        if not present:
            return None
        whole = cls()
        for part in present:
            whole.extend(part)
        return whole


FinishReason = Literal["stop", "length", "abort"]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended.

    Attributes:
        matched: the stop token id or the stop string.
        message, status: the reason of an abort, and the HTTP status of the error; 0 if the client asked for it.
        param: the request field at fault, if there is one.
        code: OpenAI's `code` of the error, if there is one.
    """

    reason: FinishReason
    matched: int | str | None = None
    message: str = ""
    status: int = 0
    param: str | None = None
    code: str | None = None


class TokensOut(Message, frozen=True, kw_only=True):
    """New tokens of one request. Exactly one message of a request, the last, carries `finish`.

    A stop token that ended the request is part of `token_ids`; `finish.matched` is then its id. The last message of a
    pooling request carries `pooled`.
    """

    rid: str
    token_ids: list[int]
    progress: Progress
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    pooled: list[float] | None = None


class TokensOutBatch(Message, frozen=True, kw_only=True):
    """The new tokens of all requests of one step."""

    outs: list[TokensOut]


class RequestInfo(Message, frozen=True, kw_only=True):
    """What the detokenizer needs to decode a request; sent before the first tokens.

    `prompt_tail`: the last tokens of a prompt whose text the output continues. `shown_token_ids`: control tokens that are part of the text.
    `no_stop_trim`, `header_begins`, `header_ends`: as in `SamplingParams`.
    """

    rid: str
    stop: tuple[str, ...]
    skip_special_tokens: bool
    stream: bool
    no_stop_trim: bool = False
    prompt_tail: list[int] = []
    shown_token_ids: tuple[int, ...] = ()
    header_begins: tuple[int, ...] = ()
    header_ends: tuple[int, ...] = ()


class CacheFlushed(Message, frozen=True, kw_only=True):
    """The prefix cache is empty; `pages` were in it."""

    pages: int


class ProfileAt(Message, frozen=True, kw_only=True):
    """A profile started in the folder `path`, or was written to the file `path`."""

    path: str


class CallFailed(Message, frozen=True, kw_only=True):
    """An administrative call failed; `status`, `code` and `param` are those of the HTTP error."""

    message: str
    status: int = 500
    code: str | None = None
    param: str | None = None


class ControlReply(Message, frozen=True, kw_only=True):
    """The answer to the `ControlReq` of the same `call_id`."""

    call_id: str
    result: SchedulerStats | CacheFlushed | ProfileAt | CallFailed


class Heartbeat(Message, frozen=True, kw_only=True):
    """A heartbeat of a process; that of the scheduler has `stats`."""

    who: Literal["scheduler", "detokenizer"]
    stats: SchedulerStats | None = None


ToDetokenizer = RequestInfo | TokensOutBatch | ControlReply | Heartbeat | DrainReq


class TextOut(TokensOut, frozen=True, kw_only=True):
    """`TokensOut` with its text: complete characters only, and no part of a stop string unless `no_stop_trim` keeps it.

    `index`: the choice, 0..n - 1, which `Generation` sets.
    """

    text: str
    index: int = 0

    @staticmethod
    def joined(outs: Sequence[TextOut]) -> TextOut:
        """Consecutive messages of one request as one, with the counts of the last."""
        if len(outs) == 1:
            return outs[0]
        return msgspec.structs.replace(
            outs[-1],
            text="".join(out.text for out in outs),
            token_ids=[token for out in outs for token in out.token_ids],
            logprobs=TokenLogprobs.joined([out.logprobs for out in outs]),
            prompt_logprobs=TokenLogprobs.joined([out.prompt_logprobs for out in outs]),
        )


class TextOutBatch(Message, frozen=True, kw_only=True):
    """The new text of all requests of one step."""

    outs: list[TextOut]


ToTokenizer = TextOutBatch | ControlReply | Heartbeat
