"""Converts the 8-bit keys and values of several requests to 16 bits, from their pages to a dense buffer (Triton)."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.attention.kernels.paged_keys import PagedKeys

BLOCK = 8192
"""Values per program."""


@triton.jit(do_not_specialize=["table_width", "columns", "part_stride"], do_not_specialize_on_alignment=["rows_ptr", "lens_ptr"])
def _widen_kernel(k_ptr, v_ptr, out_ptr, pages_ptr, rows_ptr, lens_ptr, scales_ptr, table_width, columns, part_stride,
                  PAGE: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program (request * columns + page, block, 0 for keys or 1 for values)."""
    to, is_v = tl.program_id(0), tl.program_id(2)
    request, column = to // columns, to % columns
    if column * PAGE >= tl.load(lens_ptr + request):
        return
    page = tl.load(pages_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_width + column).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < NUMBERS
    from_ptr = v_ptr if is_v else k_ptr
    stored = tl.load(from_ptr + page * NUMBERS + at, mask=inside, other=0.0)
    wide = stored.to(tl.float32) * tl.load(scales_ptr + is_v)
    tl.store(out_ptr + is_v * part_stride + to.to(tl.int64) * NUMBERS + at, wide.to(out_ptr.dtype.element_ty), mask=inside)


def widen_keys(
    k_cache: torch.Tensor, v_cache: torch.Tensor, keys: PagedKeys, scales: torch.Tensor, columns: int, out: torch.Tensor
) -> None:
    """Write the keys and values of each request, times their scale, to `out`. Pages beyond a request's last key are not written.

    Args:
        k_cache, v_cache: e4m3 [num_pages, page_size, G, D], contiguous.
        keys: rows int32 [B] and seq_lens int32 [B] of the requests.
        scales: float32 [2], of keys and of values.
        columns: maximum pages of a request.
        out: [2, at least B * columns, page_size, G, D] in 16 bits, contiguous; page c of request i goes to i * columns + c.
    """
    numbers = k_cache[0].numel()
    grid = (len(keys.rows) * columns, triton.cdiv(numbers, BLOCK), 2)
    _widen_kernel[grid](
        k_cache, v_cache, out, keys.pages, keys.rows, keys.seq_lens, scales, keys.pages.stride(0), columns, out.stride(0),
        PAGE=keys.page_size, NUMBERS=numbers, BLOCK=BLOCK,
    )  # fmt: skip
