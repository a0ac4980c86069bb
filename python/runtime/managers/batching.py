"""From requests to the arrays of one `ScheduleBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.batch import ForwardMode, Int32, RowInit, ScheduleBatch, WorkerLimits, no_ints
from runtime.managers.req import Req


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of a request, to be prefilled in one batch."""

    req: Req
    start: int
    count: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether a token is sampled after it."""
        return self.end == self.req.fill_len


@dataclass(slots=True)
class PageWrites:
    """Entries of the page table that changed since the last batch; all of them belong to requests of the next one."""

    rows: list[int] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    runs: list[Int32] = field(default_factory=list)

    def add(self, row: int, col: int, pages: Int32) -> None:
        """Pages int32 [n] of `row`, from column `col` on."""
        if len(pages):
            self.rows.append(row)
            self.cols.append(col)
            self.runs.append(pages)

    def arrays(self) -> tuple[Int32, Int32, Int32]:
        """Rows, columns and page ids, int32 [P] each."""
        if not self.runs:
            return no_ints(), no_ints(), no_ints()
        sizes = np.array([len(run) for run in self.runs])
        ids = np.concatenate(self.runs)
        within = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return as_int32(np.repeat(self.rows, sizes)), as_int32(np.repeat(self.cols, sizes) + within), ids


def extend_batch(
    step: int, chunks: Sequence[Chunk], new_rows: list[RowInit], writes: PageWrites, decode: ScheduleBatch | None
) -> ScheduleBatch:
    """One EXTEND step over `chunks`, with `decode` in the same pass."""
    reqs = [chunk.req for chunk in chunks]
    starts = as_int32([chunk.start for chunk in chunks])
    page_rows, page_cols, page_ids = writes.arrays()
    return ScheduleBatch(
        step=step,
        mode=ForwardMode.EXTEND,
        rows=as_int32([req.row for req in reqs]),
        len_bounds=starts,
        top_logprobs=as_int32([req.source.top_logprobs for req in reqs]),
        new_rows=new_rows,
        page_rows=page_rows,
        page_cols=page_cols,
        page_ids=page_ids,
        prefix_lens=starts.copy(),
        extend_lens=as_int32([chunk.count for chunk in chunks]),
        token_ids=np.concatenate([chunk.req.ids[chunk.start : chunk.end] for chunk in chunks]),
        next_tokens=as_int32([-1 if chunk.is_last else int(chunk.req.ids[chunk.end]) for chunk in chunks]),
        prompt_logprobs=np.array([req.wants_prompt_logprobs for req in reqs], dtype=np.bool_),
        decode=decode,
    )


def decode_batch(step: int, reqs: Sequence[Req], limits: WorkerLimits, writes: PageWrites) -> ScheduleBatch:
    """One DECODE step of `reqs`."""
    page_rows, page_cols, page_ids = writes.arrays()
    return ScheduleBatch(
        step=step,
        mode=ForwardMode.DECODE,
        rows=as_int32([req.row for req in reqs]),
        len_bounds=as_int32([req.kv_bound(limits.max_accept_len) for req in reqs]),
        top_logprobs=as_int32([req.source.top_logprobs for req in reqs]),
        page_rows=page_rows,
        page_cols=page_cols,
        page_ids=page_ids,
    )


def as_int32(values: Sequence[int] | np.ndarray) -> Int32:
    """int32 [n]."""
    return np.asarray(values, dtype=np.int32)
