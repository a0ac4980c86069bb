"""From requests to the arrays of one `ScheduleBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.batch import Int32, RowInit, ScheduleBatch, WorkerLimits, no_ints
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


def make_batch(
    step: int, chunks: Sequence[Chunk], decoding: Sequence[Req], new_rows: list[RowInit], writes: PageWrites, limits: WorkerLimits
) -> ScheduleBatch:
    """One step of the prompt `chunks` and the requests that are `decoding`."""
    reqs = [*(chunk.req for chunk in chunks), *decoding]
    starts = as_int32([chunk.start for chunk in chunks])
    page_rows, page_cols, page_ids = writes.arrays()
    return ScheduleBatch(
        step=step,
        rows=as_int32([req.row for req in reqs]),
        len_bounds=np.concatenate([starts, as_int32([req.kv_bound(limits.max_accept_len) for req in decoding])]),
        top_logprobs=as_int32([req.source.top_logprobs for req in reqs]),
        new_rows=new_rows,
        page_rows=page_rows,
        page_cols=page_cols,
        page_ids=page_ids,
        prefix_lens=starts,
        extend_lens=as_int32([chunk.count for chunk in chunks]),
        token_ids=np.concatenate([no_ints(), *(chunk.req.ids[chunk.start : chunk.end] for chunk in chunks)]),
        next_tokens=as_int32([-1 if chunk.is_last else int(chunk.req.ids[chunk.end]) for chunk in chunks]),
        prompt_logprobs=np.array([chunk.req.wants_prompt_logprobs for chunk in chunks], dtype=np.bool_),
    )


def as_int32(values: Sequence[int] | np.ndarray) -> Int32:
    """int32 [n]."""
    return np.asarray(values, dtype=np.int32)
