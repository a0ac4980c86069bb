"""Argmax over long rows as two Triton kernels: of each chunk of a row, then of the chunks."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.small_gemm import start_early

FEW_ROWS = 8
"""Up to this many rows, short chunks are needed to occupy the machine."""


def argmax_rows(logits: torch.Tensor, out: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Argmax of float32 rows [N, V] into int64 [N]: the first of equal entries, the first NaN before all.

    Rows are contiguous, at any distance from each other. `pdl` as in `small_gemm`.
    """
    N, V = logits.shape
    assert logits.dtype is torch.float32, f"argmax_rows takes float32, not {logits.dtype}"
    assert logits.stride(1) == 1, "argmax_rows takes contiguous rows"
    if N == 0:
        return out
    chunk = 2048 if N <= FEW_ROWS else 8192
    chunks = triton.cdiv(V, chunk)
    partial = torch.empty((2, N, chunks), dtype=torch.int32, device=logits.device)
    launch = {"launch_pdl": True} if pdl else {}
    _chunk_kernel[(chunks, N)](logits, partial[0], partial[1], V, logits.stride(0), CHUNK=chunk, PDL=pdl, num_warps=chunk // 512, **launch)
    block = triton.next_power_of_2(chunks)
    _row_kernel[(N,)](partial[0], partial[1], out, chunks, BLOCK=block, PDL=pdl, num_warps=1, **launch)
    return out


@triton.jit
def _first_of_largest(key, column):
    """The largest of int32 keys, and the least column that holds it."""
    largest = tl.max(key, 0)
    return largest, tl.min(tl.where(key == largest, column, 0x7FFFFFFF), 0)


@triton.jit
def _chunk_kernel(logits_ptr, key_ptr, column_ptr, V, stride, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One program: one chunk of one row."""
    start_early(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < V, other=float("-inf"))
    # Integers in the order of the floats, with both zeros alike and every NaN above infinity.
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    largest, first = _first_of_largest(tl.where(column < V, key, -0x7FFFFFFF - 1), column)
    at = row * tl.num_programs(0) + chunk
    tl.store(key_ptr + at, largest)
    tl.store(column_ptr + at, first)


@triton.jit
def _row_kernel(key_ptr, column_ptr, out_ptr, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: one row."""
    start_early(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    key = tl.load(key_ptr + row * chunks + chunk, mask=inside, other=-0x7FFFFFFF - 1)
    column = tl.load(column_ptr + row * chunks + chunk, mask=inside, other=0x7FFFFFFF)
    _, first = _first_of_largest(key, column)
    tl.store(out_ptr + row, first.to(tl.int64))
