"""Kernels that trim a FlashInfer plan, made from upper bounds, to the lengths on the device."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_PAGES = 512
BLOCK_ITEMS = 128


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of each request, in FlashInfer's layout; int32.

    Attributes:
        indptr: [B + 1]; where each request's pages begin in `indices`.
        indices: the pages, request after request.
        last_page_len: [B], keys on the last page of each request.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True)
class WorkItems:
    """A plan: views of the planner's integer workspace, int32 unless noted.

    Attributes:
        requests, chunks: [count]; the request and the chunk of keys of each work item.
        merge_indptr: [B * W + 1]; offsets of the partial results of each query.
        out_indptr: [B + 1]; offsets of the partial results of each request.
        chunk_size: [1], keys of a chunk.
        valid: uint8 [count], whether the item runs.
        count: number of items, invalid ones included.
        planned: number of leading items that the planner enables.
        tile: queries times heads of a group per item.
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


def gather_pages(rows: torch.Tensor, lens: torch.Tensor, pages: torch.Tensor, page_size: int, most_pages: int, lists: PageLists) -> None:
    """Write the page lists for the lengths on the device.

    Args:
        rows: int32 [B], rows of `pages`.
        lens: int32 [B], keys of each request, possibly 0.
        pages: int32 [rows, max_pages], the page table.
        page_size: slots of a page.
        most_pages: upper bound of the pages of a request.
        lists: the output; pages are written up to `indptr[B]`.
    """
    B = rows.shape[0]
    _gather_kernel[(B, _page_blocks(most_pages))](
        rows, lens, pages, lists.indptr, lists.indices, lists.last_page_len, B, page_size, pages.stride(0),
        BLOCK_B=_block(B), BLOCK_PAGES=BLOCK_PAGES, num_warps=4,
    )  # fmt: skip


def trim_plan(
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
    """Run `gather_pages` and, in the same launch, trim a plan made from upper bounds to the lengths `lens`.

    With an untrimmed plan, outputs would be wrong: attention writes the partial result of query i and chunk j to `i * chunks + j`, where
    `chunks` follows from the true length, but the merge reads with the planned number of chunks. Trimming disables items beyond the end and
    recomputes the offsets of partial results. A plan can be trimmed again for other lengths.

    Args:
        items: the plan; `valid`, `merge_indptr` and `out_indptr` are written.
        width: queries per request.
        window: number of keys before its own that a query sees; -1 for all.

    The other arguments are those of `gather_pages`.
    """
    B = rows.shape[0]
    _trim_kernel[(max(B, triton.cdiv(items.count, BLOCK_ITEMS)), _page_blocks(most_pages))](
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
    # Without specialisation on values: the alignment of eager passes depends on their size, and a kernel must not compile while serving.
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
def _trim_kernel(
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
    """Program (b, chunk) writes one block of pages of request b, and its offsets."""
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
    """Chunks that the attention kernel counts for a request of `length` keys."""
    length = tl.maximum(length, 1)
    length = tl.where(window >= 0, tl.minimum(length, window + tile), length)
    return (length + chunk - 1) // chunk


@triton.jit
def _trim(
    lens_ptr, requests_ptr, chunks_ptr, merge_ptr, outputs_ptr, chunk_ptr, valid_ptr, num_requests, width, num_items, num_planned,
    tile, window, BLOCK_B: tl.constexpr, BLOCK_ITEMS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program b writes the offsets of the partial results of request b, and a block of work items."""
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
