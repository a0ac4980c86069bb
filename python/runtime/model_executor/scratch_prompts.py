"""Prompt steps of checks and measurements at start-up."""

from __future__ import annotations

import numpy as np

from runtime.batch import Int32, RowInit, ScheduleBatch
from runtime.model_executor.request_rows import GREEDY


def scratch_prompts(rows: Int32, prompts: Int32, pages: int) -> ScheduleBatch:
    """The step that runs a greedy prompt in each of `rows`, int32 [n].

    Args:
        prompts: int32 [n, length].
        pages: number of pages per row; those of row r start at (r - 1) * pages + 1.
    """
    zeros, length, cols = np.zeros_like(rows), prompts.shape[1], np.arange(pages, dtype=np.int32)
    return ScheduleBatch(
        step=0,
        rows=rows,
        len_bounds=zeros,
        top_logprobs=zeros - 1,
        new_rows=[RowInit(row, length, GREEDY, 0, zeros[:0], ids) for row, ids in zip(rows.tolist(), prompts, strict=True)],
        page_rows=rows.repeat(pages),
        page_cols=np.tile(cols, len(rows)),
        page_ids=((rows[:, None] - 1) * pages + 1 + cols).flatten(),
        prefix_lens=zeros,
        extend_lens=zeros + length,
        token_ids=prompts.flatten(),
        next_tokens=zeros - 1,
    )
