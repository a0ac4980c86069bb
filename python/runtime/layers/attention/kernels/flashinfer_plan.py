"""What makes a FlashInfer plan from upper bounds true: kernels that correct it from the lengths on the device."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_PAGES = 512
BLOCK_ITEMS = 128


@dataclass(frozen=True, slots=True)
class PageLists:
    """What FlashInfer reads of the page table, request after request; int32.

    Attributes:
        indptr: [B + 1]; where each request's pages begin in `indices`.
        indices: pages.
        last_page_len: [B], keys on each last page.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Where a plan lies in the planner's integer workspace: views of it, int32 where not said otherwise.

    Source: `PrefillPlanInfo` and `PrefillPlanImpl` of flashinfer 0.6.15, attention/scheduler.cuh.

    Attributes:
        requests, chunks: [items]; the request and the chunk of keys of each work item.
        merge_indptr: [B * W + 1]; where the partial results of each query begin.
        out_indptr: [B + 1]; where those of each request begin.
        chunk_size: [1], keys of a chunk.
        valid: uint8 [items], whether the item is run.
        count: how many items there are, invalid ones included.
        planned: how many the planner runs, the first ones.
        tile: queries (times heads of a group) that an item covers.
    """

    requests: torch.Tensor
    chunks: torch.Tensor
    merge_indptr: torch.Tensor
    out_indptr: torch.Tensor
    chunk_size: torch.Tensor
    valid: torch.Tensor
    count: int
    planned: int
    tile: int

    @classmethod
    def of(cls, info: Sequence[int], staged: torch.Tensor, workspace: torch.Tensor) -> WorkItems:
        """Find them; `info` is `PrefillPlanInfo` field after field, `workspace` uint8 and `staged` what was uploaded to it, on the host."""
        words, count = workspace.view(torch.int32), info[0]
        return cls(
            requests=words[info[4] // 4 :],
            chunks=words[info[6] // 4 :],
            merge_indptr=words[info[7] // 4 :],
            out_indptr=words[info[8] // 4 :],
            chunk_size=words[info[9] // 4 :],
            valid=workspace[info[12] :],
            count=count,
            planned=int(staged[info[12] : info[12] + count].count_nonzero()),
            tile=info[3],
        )


def gather_pages(rows: torch.Tensor, lens: torch.Tensor, pages: torch.Tensor, page_size: int, most_pages: int, lists: PageLists) -> None:
    """Write the true page lists.

    Args:
        rows: int32 [B], rows of `pages`.
        lens: int32 [B], keys of each request; 0 is allowed.
        pages: int32 [rows, max_pages], the page table.
        page_size: slots of a page.
        most_pages: no request has more.
        lists: written, the pages up to `indptr[B]`.
    """
    B = rows.shape[0]
    _gather_kernel[(B, _page_blocks(most_pages))](
        rows, lens, pages, lists.indptr, lists.indices, lists.last_page_len, B, page_size, pages.stride(0),
        BLOCK_B=_block(B), BLOCK_PAGES=BLOCK_PAGES, num_warps=4,
    )  # fmt: skip


def correct_plan(
    rows: torch.Tensor,
    lens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    most_pages: int,
    lists: PageLists,
    items: WorkItems,
    width: int,
    window: int,
) -> None:
    """`gather_pages`, and in the same launch make a plan from upper bounds of `lens` true, whichever lengths it was made true for before.

    Left as planned, outputs would be wrong: attention places the partial result of query i, chunk j at `i * chunks + j`, with `chunks`
    counted from the true length, and the merge reads them back at the planned count. So items past the end are switched off and the
    partial results counted again.

    Args:
        items: of the plan; `valid`, `merge_indptr` and `out_indptr` are written.
        width: queries of a request.
        window: keys before itself that a query sees, or -1 for all.
    """
    B = rows.shape[0]
    _correct_kernel[(max(B, triton.cdiv(items.count, BLOCK_ITEMS)), _page_blocks(most_pages))](
        rows, lens, pages, lists.indptr, lists.indices, lists.last_page_len,
        items.requests, items.chunks, items.merge_indptr, items.out_indptr, items.chunk_size, items.valid,
        B, page_size, pages.stride(0), width, items.count, items.planned, items.tile, window,
        BLOCK_B=_block(B), BLOCK_PAGES=BLOCK_PAGES, BLOCK_ITEMS=BLOCK_ITEMS, BLOCK_W=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def _block(requests: int) -> int:
    return max(triton.next_power_of_2(requests), 16)


def _page_blocks(most_pages: int) -> int:
    return max(triton.cdiv(most_pages, BLOCK_PAGES), 1)


@triton.jit(
    do_not_specialize=["num_requests", "page_size", "pages_stride"],
    # Lengths of an eager pass lie as their number has it: one kernel serves all, and is there before prompts come.
    do_not_specialize_on_alignment=["lens_ptr", "last_ptr"],
)
def _gather_kernel(
    rows_ptr, lens_ptr, pages_ptr, indptr_ptr, indices_ptr, last_ptr, num_requests, page_size, pages_stride,
    BLOCK_B: tl.constexpr, BLOCK_PAGES: tl.constexpr,
):  # fmt: skip
    _gather(
        rows_ptr, lens_ptr, pages_ptr, indptr_ptr, indices_ptr, last_ptr, num_requests, page_size, pages_stride, BLOCK_B, BLOCK_PAGES
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_requests", "page_size", "pages_stride", "width", "num_items", "num_planned", "tile", "window"],
    do_not_specialize_on_alignment=["lens_ptr", "requests_ptr", "chunks_ptr", "merge_ptr", "outputs_ptr", "chunk_ptr", "valid_ptr"],
)
def _correct_kernel(
    rows_ptr, lens_ptr, pages_ptr, indptr_ptr, indices_ptr, last_ptr,
    requests_ptr, chunks_ptr, merge_ptr, outputs_ptr, chunk_ptr, valid_ptr,
    num_requests, page_size, pages_stride, width, num_items, num_planned, tile, window,
    BLOCK_B: tl.constexpr, BLOCK_PAGES: tl.constexpr, BLOCK_ITEMS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < num_requests:
        _gather(
            rows_ptr, lens_ptr, pages_ptr, indptr_ptr, indices_ptr, last_ptr, num_requests, page_size, pages_stride, BLOCK_B, BLOCK_PAGES
        )  # fmt: skip
    if tl.program_id(1) == 0:
        _trim(
            lens_ptr, requests_ptr, chunks_ptr, merge_ptr, outputs_ptr, chunk_ptr, valid_ptr, num_requests, width, num_items, num_planned,
            tile, window, BLOCK_B, BLOCK_ITEMS, BLOCK_W,
        )  # fmt: skip


@triton.jit
def _gather(
    rows_ptr, lens_ptr, pages_ptr, indptr_ptr, indices_ptr, last_ptr, num_requests, page_size, pages_stride,
    BLOCK_B: tl.constexpr, BLOCK_PAGES: tl.constexpr,
):  # fmt: skip
    """One program: some pages of one request, and its offsets."""
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    i = tl.arange(0, BLOCK_B)
    lens = tl.load(lens_ptr + i, mask=i < num_requests, other=0)
    begin = tl.sum(tl.where(i < b, (lens + page_size - 1) // page_size, 0), 0)
    length = tl.load(lens_ptr + b)
    count = (length + page_size - 1) // page_size
    if chunk == 0:
        if b == 0:
            tl.store(indptr_ptr, 0)
        tl.store(indptr_ptr + b + 1, begin + count)
        tl.store(last_ptr + b, tl.where(length > 0, (length - 1) % page_size + 1, 0))
    row = tl.load(rows_ptr + b).to(tl.int64)
    col = chunk * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    page = tl.load(pages_ptr + row * pages_stride + col, mask=col < count, other=0)
    tl.store(indices_ptr + begin.to(tl.int64) + col, page, mask=col < count)


@triton.jit
def _true_chunks(length, chunk, tile, window):
    """How many chunks the attention kernel counts for a request of `length` keys."""
    length = tl.maximum(length, 1)
    length = tl.where(window >= 0, tl.minimum(length, window + tile), length)
    return (length + chunk - 1) // chunk


@triton.jit
def _trim(
    lens_ptr, requests_ptr, chunks_ptr, merge_ptr, outputs_ptr, chunk_ptr, valid_ptr, num_requests, width, num_items, num_planned,
    tile, window, BLOCK_B: tl.constexpr, BLOCK_ITEMS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program b: the partial results of request b, and a block of work items."""
    pid = tl.program_id(0)
    chunk = tl.load(chunk_ptr)
    if pid < num_requests:
        i = tl.arange(0, BLOCK_B)
        chunks = _true_chunks(tl.load(lens_ptr + i, mask=i < num_requests, other=0), chunk, tile, window)
        begin = tl.sum(tl.where(i < pid, chunks, 0), 0) * width
        mine = _true_chunks(tl.load(lens_ptr + pid), chunk, tile, window)
        j = tl.arange(0, BLOCK_W)
        tl.store(merge_ptr + pid * width + j, begin + j * mine, mask=j < width)
        tl.store(outputs_ptr + pid, begin)
        if pid == num_requests - 1:
            tl.store(merge_ptr + num_requests * width, begin + width * mine)
            tl.store(outputs_ptr + num_requests, begin + width * mine)
    x = pid * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    planned = x < num_planned
    request = tl.load(requests_ptr + x, mask=planned, other=0)
    item_chunk = tl.load(chunks_ptr + x, mask=planned, other=0)
    chunks = _true_chunks(tl.load(lens_ptr + request), chunk, tile, window)
    tl.store(valid_ptr + x, (planned & (item_chunk < chunks)).to(tl.uint8), mask=x < num_items)
