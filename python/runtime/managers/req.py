"""The state of one request in the scheduler: its tokens, its lengths, and when it ends."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from runtime.batch import Int32, RowInit
from runtime.constrained.grammar import Matcher
from runtime.managers.messages import Finish, GenerateReq, TokenLogprobs
from runtime.managers.telemetry.progress import Progress, UnsentCounts
from runtime.mem_cache.kv_page_manager import RequestPages

NEVER = 1 << 62
"""A number of tokens that no request reaches."""
MAX_UNWRITTEN = 64
"""Maximum number of new tokens kept in a list before they are written to the token array, because each write to it has a fixed cost."""


class Phase(enum.Enum):
    """The phase of a request in the scheduler."""

    COMPILING = "compiling"  # not in the queue yet: its grammar is being compiled
    WAITING = "waiting"  # no row, no pages
    PREFILLING = "prefilling"  # has a row and pages; some of its tokens were not submitted yet
    DECODING = "decoding"  # all its tokens were submitted
    ENDED = "ended"  # its row and pages are free


class Req:
    """One request.

    Of the `length` tokens known to the host (prompt and output), `kv_len` have KV that is committed and read back.
    `kv_bound` is the largest KV length after all steps in flight. While prefilling it is exact: the tokens given to the
    worker so far.

    Args:
        prompt: int32, its tokens; must not be modified.
        max_len: maximum length of any request.
        arrived: monotonic seconds.
        stream_interval: tokens between two replies of a stream.

    Attributes:
        rid: the request id.
        seq: order of arrival.
        group: the attention group that it runs in.
        total_limit: the length at which the request ends.
        stop_ids: tokens that end it.
        retracted_for_fairness: whether it waits again because another client had fewer rows.
        overtook: whether its prompt ran before longer prompts of other clients that had begun.
        overtaken: tokens of the prompts that ran before its own after its own had begun.
        draft_limit: maximum number of drafts per window.
        grammar: the compiled grammar of the output; None for free text.
        prefill_len: tokens to prefill: the prompt, and after a retraction also the output so far.
        emits_in_flight: steps in flight that emit at least one token of it.
        unfollowed: upper bound of the positions at the end of its KV whose draft KV does not exist yet.
        unsent: tokens that the detokenizer does not have yet.
        reply_at: unsent tokens that make a reply due. A stream gets its first tokens at once, then every `reply_interval`; a request
            with stop strings gets each token, because the detokenizer searches the text; all others get everything at the end.
        counts: steps that `progress` does not include yet.
        running_counts: whether each reply includes them; also for stop strings, because the detokenizer may end the request at any reply.
        gives_tokens_only: whether replies have neither log-probabilities nor pooling results.
        kept_lens: numbers of tokens after which its prompt leaves its recurrent state for later requests, ascending.
        pooled: float64, the sum of the results of the prompt chunks of a pooling request so far.
        progress: the counts that replies carry; messages share this instance, so `send` must encode before it returns.
    """

    def __init__(
        self,
        request: GenerateReq,
        prompt: Int32,
        seq: int,
        eos_ids: tuple[int, ...],
        max_len: int,
        arrived: float,
        stream_interval: int = 1,
    ) -> None:
        sampling = request.sampling
        self.request, self.rid = request, request.rid
        self.seq = seq
        self.arrived = arrived
        self.draft_limit = sampling.draft_limit
        self.prompt_len = self.length = self.prefill_len = len(request.input_ids)
        self.total_limit = min(self.prompt_len + sampling.max_new_tokens, max_len)
        self._ids = prompt  # shared with the other texts of its call until it is admitted
        self._unwritten: list[int] = []  # the last tokens, which `_ids` does not have yet
        # A finished grammar allows nothing but the end of the text.
        endless = sampling.ignore_eos and sampling.grammar is None
        self.stop_ids = frozenset(sampling.stop_token_ids).union(() if endless else eos_ids)
        self.grammar: Matcher | None = None
        self.phase = Phase.WAITING
        self.row = self.group = 0
        self.pages = RequestPages(request.cache_salt)
        self.kv_len = self.kv_bound = self.emits_in_flight = self.unfollowed = 0
        self.retracted = self.retracted_for_fairness = self.overtook = self.was_admitted = False
        self.overtaken = 0
        self.kept_lens: list[int] = []
        self.unsent: list[int] = []
        self.progress = Progress(self.prompt_len)
        self.top_logprobs = request.top_logprobs
        self.reply_interval = 1 if sampling.stop else stream_interval if request.stream else NEVER
        self.reply_at = 1 if request.stream else self.reply_interval
        self.running_counts = request.running_counts or bool(sampling.stop)
        self.counts = UnsentCounts()
        self.gives_tokens_only = request.top_logprobs < 0 and not request.prompt_logprobs and request.pooling is None
        self.logprobs = TokenLogprobs()
        self.pooled: npt.NDArray[np.float64] | None = None
        self.prompt_logprobs: TokenLogprobs | None = TokenLogprobs() if request.prompt_logprobs else None

    # ---- state

    @property
    def shared_priority(self) -> int:
        """Its priority as compared with other clients, at most `max_priority`."""
        return min(self.request.priority, self.request.max_priority)

    @property
    def ids(self) -> Int32:
        """Its tokens so far, prompt and output, int32 [length]."""
        if self._unwritten:
            self._write()
        return self._ids[: self.length]

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far."""
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens up to the length limit."""
        return self.total_limit - self.length

    @property
    def cacheable_len(self) -> int:
        """Number of positions whose KV, including the draft's, may be cached."""
        return max(min(self.kv_len - self.unfollowed, self.length - 1), 0)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.phase is not Phase.ENDED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are missing; cached prefixes have none, so the whole prompt is computed."""
        return self.prompt_logprobs is not None and self.completion_tokens == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether no cached prefix may be reused, because results of all prompt tokens are needed."""
        pooling = self.request.pooling
        return self.wants_prompt_logprobs or (pooling is not None and pooling.whole_prompt)

    def row_init(self, needs_history: bool) -> RowInit:
        """What the worker needs to know about the request; with `needs_history` all its tokens."""
        sampling = self.request.sampling
        return RowInit(
            row=self.row,
            prompt_len=self.prompt_len,
            sampling=sampling,
            seed=self.request.seed,
            eos_ids=np.array(sorted(self.stop_ids), dtype=np.int32),
            history=self.ids.copy() if sampling.penalised or needs_history or self.grammar is not None else None,
            grammar=self.grammar,
            tokens=self.ids,
        )

    # ---- events

    def admit(self, row: int, pages: RequestPages, prefix_len: int, now: float) -> None:
        """Start prefilling in `row`; `prefix_len` tokens have KV already."""
        self.phase, self.row, self.pages = Phase.PREFILLING, row, pages
        self.retracted = self.retracted_for_fairness = self.overtook = False
        self.unfollowed = self.overtaken = 0
        self.kv_len = self.kv_bound = prefix_len
        self.prefill_len = self.length
        if not self.was_admitted:
            self.was_admitted = True
            prompt, self._ids = self._ids, np.empty(max(self.total_limit, self.prompt_len), dtype=np.int32)
            self._ids[: self.prompt_len] = prompt
            self.progress.queue_seconds, self.progress.cached_tokens = now - self.arrived, prefix_len
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = TokenLogprobs()
        self.pooled = None

    def chunk_submitted(self, end: int) -> None:
        """The worker has the tokens up to `end`; after the last one the request decodes."""
        self.kv_bound = end
        if end == self.prefill_len:
            self.phase = Phase.DECODING
            self.emits_in_flight += 1

    def decode_collected(self, accept_len: int, max_accept_len: int, unfollowed: int) -> None:
        """A decode step committed KV of `accept_len` tokens; `unfollowed` as in `StepStats`."""
        self.kv_len += accept_len
        self.unfollowed = unfollowed
        self.kv_bound -= max_accept_len - accept_len
        self.emits_in_flight -= 1

    def retract(self) -> None:
        """Wait again, without row and pages; the output so far is kept."""
        assert self.emits_in_flight == 0, "retracted with a step in flight"
        self.phase, self.row, self.retracted = Phase.WAITING, 0, True
        self.kv_len = self.kv_bound = 0

    def end(self) -> None:
        """Leave the scheduler."""
        self.phase, self.row = Phase.ENDED, 0

    def commit(self, tokens: list[int]) -> Finish | None:
        """Append the tokens of one step. Those after the token that ends the request are removed from `tokens`.

        Returns:
            Why the request ended; None if it did not.
        """
        finish = None
        if self.length + len(tokens) >= self.total_limit or not self.stop_ids.isdisjoint(tokens):
            finish = self._end_within(tokens)
        self.length += len(tokens)
        self.unsent += tokens
        self._unwritten += tokens
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._write()
        return finish

    def _end_within(self, tokens: list[int]) -> Finish | None:
        """Remove the tokens after the one that ends the request; returns why it ends, or None if it does not."""
        # With a grammar, a stop token before the minimum length is chosen only if the grammar allows nothing else.
        least = self.request.sampling.min_new_tokens if self.grammar is None else 0
        for count, token in enumerate(tokens, 1):
            stops = token in self.stop_ids and self.completion_tokens + count > least
            if stops or self.length + count >= self.total_limit:
                del tokens[count:]
                return Finish(reason="stop", matched=token) if stops else Finish(reason="length")
        return None

    def _write(self) -> None:
        self._ids[self.length - len(self._unwritten) : self.length] = self._unwritten
        self._unwritten.clear()
