"""What scheduler and worker exchange: the step to run next, and its result. No torch.

Lengths. A request's KV length counts the positions whose KV is written and committed. The last token it emitted is not
among them: it is the input of the next step, at position `KV length`. A decode step writes at most `tokens_per_step`
positions from there and commits 1 to `max_accept_len` of them.

Overlap. `submit` may be called for step n + 1 before step n's result is read. The device then knows lengths and last
tokens that the host does not; the host passes upper bounds (`len_bounds`) and row numbers only. Steps run in the order
submitted, so that a row or page freed by the host while a step is in flight can be reused at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from runtime.constrained.grammar import GrammarFailure, Matcher
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams
from runtime.worker_info import WorkerInfo

Int32 = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]

PAD_ROW = 0
"""The request row of padding."""


_NO_INTS: Int32 = np.empty(0, dtype=np.int32)
_NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)


def no_ints() -> Int32:
    """An empty int32 array."""
    return _NO_INTS


def no_flags() -> Flags:
    """An empty bool array."""
    return _NO_FLAGS


class ForwardMode(enum.IntEnum):
    """What one forward pass does."""

    EXTEND = 1
    DECODE = 2
    TARGET_VERIFY = 3
    DRAFT_EXTEND = 4


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The capacity of the device side, on which admission is based.

    Attributes:
        max_total_tokens: KV slots that requests may use, a multiple of `page_size`; pages are numbered
            1..max_total_tokens/page_size.
        max_running_requests: rows that requests may use, numbered 1..max_running_requests.
        max_context_len: prompt and output tokens of one request.
        max_extend_tokens: tokens of one prompt step, including `tokens_per_step` for each decode row in it.
        page_size: slots allocated together.
        vocab_size: token ids are 0..vocab_size - 1.
        tokens_per_step: positions past the KV length that a decode step may write: 1, or max(K * topk, D).
        max_accept_len: tokens that a decode step may commit: 1, or K + 1.
        prefix_lookahead: 1 when KV at a position also depends on the next token (EAGLE), so that a cached prefix
            of n tokens may be reused only by a prompt that agrees on n + 1; else 0.
        overlap: whether step n + 1 may be submitted before step n's result is read.
        needs_history: whether every `RowInit` must carry its history.
        mixed: whether a step may have both prompt chunks and decode rows.
        saturating_tokens: prompt tokens that saturate the device: longer steps take proportionally longer. 0 if
            unknown.
        piggyback_min_tokens: prompt tokens from which decode rows are cheaper in a prompt step than in a step of their
            own. Shorter prompts run through graphs that hold no decode rows.
        shares_prefixes: whether decode steps make use of `ScheduleBatch.shared_tokens`.
        cached_states: slots for recurrent states of cached prefixes.
        state_unit: tokens, a multiple of `page_size`: a chunk that begins at a multiple of it can leave its recurrent state at a multiple;
            0 for a model without recurrent states.
        groups: number of attention groups; `max_total_tokens` and `max_running_requests` are those of each.
    """

    max_total_tokens: int
    max_running_requests: int
    max_context_len: int
    max_extend_tokens: int
    page_size: int
    vocab_size: int
    tokens_per_step: int = 1
    max_accept_len: int = 1
    prefix_lookahead: int = 0
    overlap: bool = True
    needs_history: bool = False
    mixed: bool = False
    saturating_tokens: int = 0
    piggyback_min_tokens: int = 1
    shares_prefixes: bool = False
    cached_states: int = 0
    state_unit: int = 0
    groups: int = 1

    @property
    def server_tokens(self) -> int:
        """KV slots of all attention groups."""
        return self.max_total_tokens * self.groups

    @property
    def server_requests(self) -> int:
        """Requests that run together in all attention groups."""
        return self.max_running_requests * self.groups

    @property
    def max_request_len(self) -> int:
        """Prompt and output tokens of one request that runs alone: the context, or less where KV holds less.

        Its last decode step starts at a KV length two below this and may write `tokens_per_step` positions.
        """
        return min(self.max_context_len, self.max_total_tokens + 2 - self.tokens_per_step)


@dataclass(frozen=True, slots=True)
class RowInit:
    """What the worker must know of a request that takes a row, until the row is freed.

    Attributes:
        row: 1..max_running_requests.
        prompt_len: the position of the first output token, also after a retraction.
        sampling: the request's parameters.
        seed: the stream of random numbers; every draw is keyed by (seed, position), so that it does not depend on the
            batch.
        eos_ids: int32 [E], forbidden while the output is shorter than `sampling.min_new_tokens`: end-of-text and stop
            ids.
        history: int32, prompt and output so far, where penalties, a grammar or the worker (`needs_history`) need it; else
            None.
        grammar: `sampling.grammar`, compiled; None for free text.
        tokens: int32, prompt and output so far: a view of the request's own array, valid until `Worker.submit` returns. Only rank 0 has
            it.
    """

    row: int
    prompt_len: int
    sampling: SamplingParams
    seed: int
    eos_ids: Int32
    history: Int32 | None = None
    grammar: Matcher | None = None
    tokens: Int32 = field(default_factory=no_ints)


class StateCopy(NamedTuple):
    """A request in `row`, new in this step, that begins with a cached recurrent state: that in `slot`, of `length` tokens."""

    row: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class EagerSample:
    """Which parts of an iteration run a second time, eagerly, to compare their drafts with those of graphs.

    Attributes:
        taken: whether the draft passes run again.
        verify: whether verification also runs again.
    """

    taken: bool = False
    verify: bool = False


NO_SAMPLE = EagerSample()


@dataclass(slots=True)
class ScheduleBatch:
    """One step for the worker: a ragged batch of B requests, P new pages, C copied pages, T prompt tokens.

    The first E requests are prompt chunks. The other B - E are decode rows: their input token is on the device already,
    so that before drafting their query length is 1.

    Attributes:
        step: the number of this step, counting up.
        rows: int32 [B].
        len_bounds: int32 [B]. KV length before the step: exact for prompt chunks (it equals `prefix_lens`), an upper
            bound for decode rows.
        new_rows: rows that new requests took since the last step.
        page_rows, page_cols, page_ids: int32 [P] each. Page `page_ids[i]` holds positions from `page_cols[i] *
            page_size` of row `page_rows[i]`.
        copy_sources, copy_targets, copy_counts: int32 [C] each. Before anything else in the step, the KV in the first
            `copy_counts[i]` slots of page `copy_sources[i]` is copied to page `copy_targets[i]`. No page is the target of two
            copies, or source and target.
        prefix_lens: int32 [E]. Positions of each chunk's request whose KV exists.
        extend_lens: int32 [E]. New prompt tokens of each chunk, at least 1.
        token_ids: int32 [T]. Those tokens, request after request.
        next_tokens: int32 [E]. The prompt token after the chunk; -1 where the chunk ends the prompt and a token is
            sampled.
        top_logprobs: int32 [B]. -1: no log-probabilities; k >= 0: those of the chosen token and the k most likely tokens.
        prompt_logprobs: bool [E]. Whether log-probabilities of the chunk's prompt tokens are wanted too.
        pooling: by index of the chunk: what its hidden states are reduced to.
        restored: those of `new_rows` that begin with cached recurrent states, which are copied before anything else in the step.
        kept_lens, kept_slots: int32 [E] each; empty where all would be 0. After `kept_lens[i]` tokens of the request, a multiple of
            `WorkerLimits.state_unit` after the chunk's start, chunk i leaves a copy of its recurrent state in that slot; 0: it does not.
        depth: K of the decode rows, which `Worker.submit` chooses.
        widths: with `depth`, int32 [padded B - E]: tokens of each window, where they differ; empty where all have `depth` + 1.
        copied: bool [B - E]. Which decode rows currently copy their prompt, in the view of a depth controller; empty without one. Chosen by
            `Worker.submit`.
        defers_first_drafts: whether drafts are not expected to follow these prompts, so that the draft computes the first ones only when
            they are needed; chosen by `Worker.submit`.
        sample: the eager sample of this step; chosen by `Worker.submit`.
        shared_tokens: KV at the front of all decode rows that lies in the same pages; 0 in steps with prompts, and if
            the worker does not make use of it.
        sections: the part of each attention group, if there are several; all fields but `step` and those that `Worker.submit` chooses are
            then empty.
        pad_decodes, pad_tokens: decode rows and prompt tokens of the largest section, to which this one is padded; 0 for one group.
        pad_kv: the largest sum of decode-row `len_bounds` over all sections; 0 for one group.
    """

    step: int
    rows: Int32
    len_bounds: Int32
    top_logprobs: Int32
    new_rows: list[RowInit] = field(default_factory=list)
    page_rows: Int32 = field(default_factory=no_ints)
    page_cols: Int32 = field(default_factory=no_ints)
    page_ids: Int32 = field(default_factory=no_ints)
    copy_sources: Int32 = field(default_factory=no_ints)
    copy_targets: Int32 = field(default_factory=no_ints)
    copy_counts: Int32 = field(default_factory=no_ints)
    prefix_lens: Int32 = field(default_factory=no_ints)
    extend_lens: Int32 = field(default_factory=no_ints)
    token_ids: Int32 = field(default_factory=no_ints)
    next_tokens: Int32 = field(default_factory=no_ints)
    prompt_logprobs: Flags = field(default_factory=no_flags)
    pooling: dict[int, Pooling] = field(default_factory=dict)
    restored: list[StateCopy] = field(default_factory=list)
    kept_lens: Int32 = field(default_factory=no_ints)
    kept_slots: Int32 = field(default_factory=no_ints)
    depth: int = 0
    widths: Int32 = field(default_factory=no_ints)
    copied: Flags = field(default_factory=no_flags)
    defers_first_drafts: bool = False
    sample: EagerSample = NO_SAMPLE
    shared_tokens: int = 0
    sections: list[ScheduleBatch] = field(default_factory=list)
    pad_decodes: int = 0
    pad_tokens: int = 0
    pad_kv: int = 0

    @classmethod
    def of_groups(cls, sections: list[ScheduleBatch]) -> ScheduleBatch:
        """The step of several attention groups, which all run passes of one size.

        Where only others have prompts, a section gets a prompt of one token in the padding row.
        """
        decodes, tokens = max(each.num_decodes for each in sections), max(len(each.token_ids) for each in sections)
        kv = max(int(each.decode_len_bounds.sum()) for each in sections)
        for each in sections:
            each.pad_decodes, each.pad_tokens, each.pad_kv = decodes, tokens, kv
            if tokens and not each.num_prompts:
                zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
                each.rows, each.len_bounds, each.top_logprobs = zero + PAD_ROW, zero, -one
                each.prefix_lens, each.extend_lens, each.token_ids, each.next_tokens = zero, one, zero, zero
                each.prompt_logprobs = zero > 0
        return cls(sections[0].step, no_ints(), no_ints(), no_ints(), sections=sections)

    @property
    def num_prompts(self) -> int:
        """E."""
        return len(self.extend_lens)

    @property
    def num_decodes(self) -> int:
        """B - E."""
        return len(self.rows) - self.num_prompts

    @property
    def prompt_rows(self) -> Int32:
        """int32 [E]."""
        return self.rows[: self.num_prompts]

    @property
    def decode_rows(self) -> Int32:
        """int32 [B - E]."""
        return self.rows[self.num_prompts :]

    @property
    def decode_len_bounds(self) -> Int32:
        """int32 [B - E]."""
        return self.len_bounds[self.num_prompts :]

    @property
    def parts(self) -> list[ScheduleBatch]:
        """The sections, or this batch if it has none."""
        return self.sections or [self]

    def chunk(self, index: int) -> slice:
        """Where the tokens of a prompt chunk are among the T."""
        stop = int(self.extend_lens[: index + 1].sum())
        return slice(stop - int(self.extend_lens[index]), stop)

    @property
    def max_decodes(self) -> int:
        """The largest B - E of all attention groups."""
        return max((section.num_decodes for section in self.sections), default=self.num_decodes)

    @property
    def has_prompts(self) -> bool:
        """Whether any attention group has prompt chunks."""
        return any(part.num_prompts for part in self.parts)

    @property
    def longest(self) -> int:
        """An upper bound of all KV lengths before the step, in all attention groups."""
        return max(int(part.len_bounds.max(initial=0)) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of N tokens and of the k most likely tokens at each position.

    Attributes:
        chosen: float32 [N].
        top_ids: int32 [N, k].
        top: float32 [N, k], in descending order.
    """

    chosen: Float32
    top_ids: Int32
    top: Float32


@dataclass(frozen=True, slots=True)
class StepStats:
    """How the decode rows of one step ran; all zero where it has none.

    Attributes:
        graph: whether a captured graph was replayed.
        padded_size: requests that the graph was captured for; B - E when eager.
        draft_tokens: drafts verified per request: D - 1; 0 without drafts.
        depth: K; equal to `draft_tokens` but for trees.
        drafts: verified for each decode row, where windows differ in width.
        unfollowed: upper bound of positions at the end of a row's KV without draft KV; the prefix cache must not hold them.
    """

    graph: bool = False
    padded_size: int = 0
    draft_tokens: int = 0
    depth: int = 0
    unfollowed: int = 0
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a step emitted.

    Attributes:
        token_ids: int32 [sum(accept_lens)], request after request.
        accept_lens: int32 [B]. Prompt chunks: 1 where the chunk ends the prompt, else 0. Decode rows:
            1..max_accept_len.
        logprobs: log-probabilities of `token_ids` if any request of the batch asked for them (k is the largest requested); else None.
        prompt_logprobs: by index in the batch: for each prompt token of the chunk the log-probability of the token
            after it (the last one's entry is the next prompt token's, or meaningless if a token was sampled there).
        stats: how the decode rows ran.
        grammar_failures: by index in the batch, why a request's grammar cannot be followed; only its valid tokens have a meaning.
        pooled: by index in the batch: what `pooling` asked for, float32 [hidden] or [labels]; for `mean`, the sum over the
            chunk's tokens.
        sections: the result of each attention group, if there are several; all other fields are then empty.
    """

    token_ids: Int32
    accept_lens: Int32
    logprobs: Logprobs | None = None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    stats: StepStats = StepStats()
    grammar_failures: dict[int, GrammarFailure] = field(default_factory=dict)
    pooled: dict[int, Float32] = field(default_factory=dict)
    sections: list[BatchResult] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpeculationChange:
    """Settings that an operator changes while the server runs. None leaves a value unchanged.

    Attributes:
        depth: K of the following steps, or less if the batch or its requests allow only less; -1 for the configured depth.
        acceptance: synthetic acceptance by draft position, all depths.
    """

    depth: int | None = None
    acceptance: tuple[float, ...] | None = None


UNCHANGED = SpeculationChange()


class Pending(Protocol):
    """A step under way."""

    def wait(self) -> BatchResult:
        """Block until the step's tokens are on the host. Raises whatever the step raised."""
        ...


class Worker(Protocol):
    """All that the scheduler knows of the device. Plain decoding and speculation look the same through it."""

    @property
    def limits(self) -> WorkerLimits:
        """The capacity of the device side."""
        ...

    def submit(self, batch: ScheduleBatch) -> Pending:
        """Queue one step and return at once."""
        ...

    def info(self) -> WorkerInfo:
        """Choices and measurements of the start-up, and counters since."""
        ...

    def change_speculation(self, change: SpeculationChange) -> None:
        """Apply `change` after all steps that were submitted. Raises `RequestError` if this worker cannot."""
        ...

    def start_profile(self, folder: str) -> None:
        """Begin a torch trace of this process, to be written into `folder`."""
        ...

    def stop_profile(self) -> str:
        """End the trace and return the file it was written to."""
        ...

    def close(self) -> None:
        """Finish what is under way and release the device."""
        ...
