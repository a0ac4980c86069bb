"""The plan of one step, from which the worker's `ScheduleBatch` is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from runtime.batch import Int32, RowInit, ScheduleBatch, StateCopy, no_ints
from runtime.managers.req import Req
from runtime.pooling import Pooling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a request, to prefill in one step.

    Attributes:
        kept_len, kept_slot: a number of tokens after which the request's recurrent state is cached, and its slot; 0 if none is.
    """

    req: Req
    start: int
    count: int
    kept_len: int = 0
    kept_slot: int = 0

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether a token is sampled after it."""
        return self.end == self.req.prefill_len

    @property
    def pooling(self) -> Pooling | None:
        """How the worker reduces it; None for generation."""
        pooling = self.req.request.pooling
        return pooling if pooling is not None and (self.is_last or pooling.whole_prompt) else None


class PageCopy(NamedTuple):
    """A copy of the first `slots` slots of a cached page to a page of a newly admitted request."""

    source: int
    target: int
    slots: int


@dataclass(slots=True)
class PageWrites:
    """Page-table entries that changed since the last step; all belong to requests of the next step."""

    _runs: list[tuple[Int32, Int32, Int32]] = field(default_factory=list)

    def add(self, rows: Sequence[int], cols: Sequence[int], counts: Sequence[int], ids: Int32) -> None:
        """Write `counts[i]` >= 1 pages to row `rows[i]` from column `cols[i]` on; `ids` int32 [sum(counts)]."""
        if len(ids) == len(counts):  # one page each
            self._runs.append((as_int32(rows), as_int32(cols), ids))
            return
        sizes = np.array(counts)
        within = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self._runs.append((as_int32(np.repeat(rows, sizes)), as_int32(np.repeat(cols, sizes) + within), ids))

    def arrays(self) -> tuple[Int32, Int32, Int32]:
        """Rows, columns and page ids, int32 [P] each."""
        if len(self._runs) > 1:
            rows, cols, ids = zip(*self._runs, strict=True)
            return np.concatenate(rows), np.concatenate(cols), np.concatenate(ids)
        return self._runs[0] if self._runs else (no_ints(), no_ints(), no_ints())


@dataclass(slots=True)
class StepPlan:
    """One step: prompt chunks, decode rows, or both in one ragged batch.

    Attributes:
        chunks: the prompt chunks.
        decodes: the requests that decode.
        new_rows: requests that got a row in this step.
        writes: changes of the page table.
        copies: copies of partially matching cached pages.
        restored: requests that begin with a cached recurrent state.
    """

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Req] = field(default_factory=list)
    new_rows: list[RowInit] = field(default_factory=list)
    writes: PageWrites = field(default_factory=PageWrites)
    copies: list[PageCopy] = field(default_factory=list)
    restored: list[StateCopy] = field(default_factory=list)

    @property
    def reqs(self) -> list[Req]:
        """All requests in this step, in the order of the batch."""
        return [*(chunk.req for chunk in self.chunks), *self.decodes]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all chunks."""
        return sum(chunk.count for chunk in self.chunks)

    def batch(self, step: int) -> ScheduleBatch:
        """The arrays for the worker: chunks first, then decode rows."""
        reqs, chunks = self.reqs, self.chunks
        page_rows, page_cols, page_ids = self.writes.arrays()
        batch = ScheduleBatch(
            step=step,
            rows=as_int32([req.row for req in reqs]),
            len_bounds=as_int32([req.kv_bound for req in reqs]),
            top_logprobs=as_int32([req.top_logprobs for req in reqs]),
            new_rows=self.new_rows,
            restored=self.restored,
            page_rows=page_rows,
            page_cols=page_cols,
            page_ids=page_ids,
        )
        if self.copies:
            batch.copy_sources, batch.copy_targets, batch.copy_counts = map(as_int32, zip(*self.copies, strict=True))
        if chunks:
            batch.prefix_lens = as_int32([chunk.start for chunk in chunks])
            batch.extend_lens = as_int32([chunk.count for chunk in chunks])
            batch.token_ids = np.concatenate([chunk.req.ids[chunk.start : chunk.end] for chunk in chunks])
            batch.next_tokens = as_int32([-1 if chunk.is_last else int(chunk.req.ids[chunk.end]) for chunk in chunks])
            batch.prompt_logprobs = np.array([chunk.req.wants_prompt_logprobs for chunk in chunks], dtype=np.bool_)
            if any(chunk.kept_len for chunk in chunks):
                batch.kept_lens = as_int32([chunk.kept_len for chunk in chunks])
                batch.kept_slots = as_int32([chunk.kept_slot for chunk in chunks])
            batch.pooling = {i: pooling for i, chunk in enumerate(chunks) if (pooling := chunk.pooling) is not None}
        return batch

    @classmethod
    def batch_of(cls, plans: Sequence[StepPlan], step: int) -> ScheduleBatch:
        """The arrays for the worker, from one plan per attention group."""
        batches = [plan.batch(step) for plan in plans]
        return batches[0] if len(batches) == 1 else ScheduleBatch.of_groups(batches)

    def mark_submitted(self, max_accept_len: int) -> None:
        """Update the requests after the step was submitted."""
        for chunk in self.chunks:
            chunk.req.chunk_submitted(chunk.end)
        for req in self.decodes:
            req.kv_bound += max_accept_len
            req.emits_in_flight += 1


def as_int32(values: Sequence[int] | np.ndarray) -> Int32:
    """`values` as int32 [n]."""
    return np.asarray(values, dtype=np.int32)
