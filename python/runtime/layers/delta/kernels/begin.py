"""The start of a pass over recurrent states, as one Triton kernel; `StatePool.begin` defines the results."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.mem_cache.state_pool import StatePass, StatePool

BLOCK = 128
"""Requests of one program."""


def begin(pool: StatePool, rows: torch.Tensor, seq_lens: torch.Tensor, qo_indptr: torch.Tensor, pdl: bool) -> StatePass:
    """As `StatePool.begin`."""
    count, device = len(rows), rows.device
    # One allocation each: parts of one would be aligned differently for each count, for which Triton compiles all later kernels again.
    pending, kept, fresh, kept_rows = (
        torch.empty(count, dtype=dtype, device=device) for dtype in (torch.int32, torch.int32, torch.bool, torch.int64)
    )
    _begin[(triton.cdiv(count, BLOCK),)](
        rows, seq_lens, qo_indptr, pool.applied, pool.kept_lens, pool.kept_rows, pending, fresh, kept, kept_rows, count, pool.window_width,
        BLOCK=BLOCK, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return StatePass(pool.layers, rows, pending, fresh, kept, kept_rows)


@triton.jit(do_not_specialize=["requests", "width"], do_not_specialize_on_alignment=["row_ids", "seq_lens", "indptr"])
def _begin(
    row_ids, seq_lens, indptr, applied, kept_lens, pool_kept_rows, pending, fresh, kept, kept_rows, requests, width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` requests."""
    pdl_sync(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = request < requests
    row = tl.load(row_ids + request, mask=live, other=0)
    count = tl.load(indptr + request + 1, mask=live, other=0) - tl.load(indptr + request, mask=live, other=0)
    length = tl.load(seq_lens + request, mask=live, other=0)
    start = length - count
    waiting = tl.load(applied + row, mask=live, other=0)
    waiting = tl.where(start == 0, 0, tl.minimum(tl.maximum(start - waiting, 0), width))
    tl.store(pending + request, waiting, mask=live)
    tl.store(fresh + request, start == 0, mask=live)
    copied = tl.load(kept_lens + row, mask=live, other=0) - start
    tl.store(kept + request, tl.where((copied < 0) | (copied > count), 0, copied), mask=live)
    tl.store(kept_rows + request, tl.load(pool_kept_rows + row, mask=live, other=0), mask=live)
    tl.store(applied + row, tl.where(count > width, length, start), mask=live)
