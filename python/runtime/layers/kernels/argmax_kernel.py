"""Argmax over long rows as two Triton kernels: one reduces chunks of a row, one reduces the chunks."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.argmax_reduce import LEAST_KEY, NO_COLUMN, tile_argmax
from runtime.layers.kernels.pdl import launch_options, pdl_sync

FEW_ROWS = 8
"""Maximum rows for which chunks are short, so that they occupy the whole GPU."""
CHUNKS_PER_WARP = 256
"""Chunks of a row that each warp reduces, with at most `MAX_WARPS`."""
MAX_WARPS = 8


def argmax_rows(logits: torch.Tensor, out: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Argmax of float32 rows [N, V] into int64 [N]: the first of equal entries; the first NaN counts as the largest.

    Each row is contiguous; the row stride is arbitrary. `pdl` as in `triton_gemm`.
    """
    N, V = logits.shape
    assert logits.dtype is torch.float32, f"expected float32 logits; got {logits.dtype}"
    assert logits.stride(1) == 1, "expected contiguous rows"
    if N == 0:
        return out
    chunk = 2048 if N <= FEW_ROWS else 8192
    chunks = triton.cdiv(V, chunk)
    partial = torch.empty((2, N, chunks), dtype=torch.int32, device=logits.device)
    _chunk_kernel[(chunks, N)](
        logits, partial, V, logits.stride(0), CHUNK=chunk, PDL=pdl, num_warps=chunk // 512,
        **launch_options(pdl),
    )  # fmt: skip
    return argmax_chunks(partial, out, pdl)


def argmax_chunks(partial: torch.Tensor, out: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Argmax of rows whose chunks are already reduced, into int64 [N].

    Args:
        partial: int32 [2, N, chunks] contiguous: the key of each chunk's largest entry and its first column, by
            `tile_argmax`.
        pdl: as in `triton_gemm`.
    """
    _, N, chunks = partial.shape
    block = triton.next_power_of_2(chunks)
    warps = min(max(block // CHUNKS_PER_WARP, 1), MAX_WARPS)
    _row_kernel[(N,)](partial, out, chunks, BLOCK=block, PDL=pdl, num_warps=warps, **launch_options(pdl))
    return out


@triton.jit
def _chunk_kernel(logits_ptr, partial_ptr, V, stride, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One program: one chunk of one row."""
    pdl_sync(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < V, other=float("-inf"))
    key, first = tile_argmax(x, column)
    at = partial_ptr + row * tl.num_programs(0) + chunk + tl.arange(0, 1)
    tl.store(at, key)
    tl.store(at + tl.num_programs(1) * tl.num_programs(0), first)


@triton.jit
def _row_kernel(partial_ptr, out_ptr, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: one row."""
    pdl_sync(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    at = partial_ptr + row * chunks + chunk
    key = tl.load(at, mask=inside, other=LEAST_KEY)
    column = tl.load(at + tl.num_programs(0) * chunks, mask=inside, other=NO_COLUMN)
    first = tl.min(tl.where(key == tl.max(key, 0), column, NO_COLUMN), 0)
    tl.store(out_ptr + row, first.to(tl.int64))
