"""Argmax over long rows as two Triton kernels: of each chunk of a row, then of the chunks."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.gemm.triton_gemm import start_early
from runtime.layers.kernels.argmax_reduce import LEAST_KEY, NO_COLUMN, first_of_largest

FEW_ROWS = 8
"""Up to this many rows, short chunks are needed to occupy the machine."""
ENTRIES_A_WARP = 256
"""Chunks of a row that each warp goes through, in up to `MOST_WARPS`."""
MOST_WARPS = 8


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
    _chunk_kernel[(chunks, N)](logits, partial, V, logits.stride(0), CHUNK=chunk, PDL=pdl, num_warps=chunk // 512, **launch)
    return argmax_chunks(partial, out, pdl)


def argmax_chunks(partial: torch.Tensor, out: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Argmax of rows whose chunks have been reduced, into int64 [N].

    Args:
        partial: int32 [2, N, chunks] contiguous: the key of each chunk's largest entry and its first column, by `first_of_largest`.
        pdl: as in `small_gemm`.
    """
    _, N, chunks = partial.shape
    block = triton.next_power_of_2(chunks)
    warps = min(max(block // ENTRIES_A_WARP, 1), MOST_WARPS)
    _row_kernel[(N,)](partial, out, chunks, BLOCK=block, PDL=pdl, num_warps=warps, **({"launch_pdl": True} if pdl else {}))
    return out


@triton.jit
def _chunk_kernel(logits_ptr, partial_ptr, V, stride, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One program: one chunk of one row."""
    start_early(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < V, other=float("-inf"))
    key, first = first_of_largest(x, column)
    at = partial_ptr + row * tl.num_programs(0) + chunk + tl.arange(0, 1)
    tl.store(at, key)
    tl.store(at + tl.num_programs(1) * tl.num_programs(0), first)


@triton.jit
def _row_kernel(partial_ptr, out_ptr, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: one row."""
    start_early(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    at = partial_ptr + row * chunks + chunk
    key = tl.load(at, mask=inside, other=LEAST_KEY)
    column = tl.load(at + tl.num_programs(0) * chunks, mask=inside, other=NO_COLUMN)
    first = tl.min(tl.where(key == tl.max(key, 0), column, NO_COLUMN), 0)
    tl.store(out_ptr + row, first.to(tl.int64))
