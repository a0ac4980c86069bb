"""Queries of absorbed latent attention in CUDA C++: blocks prefetch their weights before the tokens are ready (`absorb_queries.cu`)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from runtime.layers.absorption import TOKEN_TILES, token_tile
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program
from runtime.layers.latent_heads import LatentHeads, NewRows

WARPS = 4
COLUMNS = 16 * WARPS
"""Latent columns of a block."""
MOST_NOPE = 256
"""Unrotated columns of a head: for 64 latent columns they take 32 KiB per block."""
ALIGNED = 8
"""16-bit values per 16-byte copy."""


def supports(q: torch.Tensor, heads: LatentHeads, key: torch.Tensor) -> bool:
    """Whether the kernel supports these queries on their device: few tokens in bfloat16, with widths that are multiples of the tiles."""
    nope, rank, rope = heads.nope_dim, heads.kv_rank, heads.rope.dim
    return (
        q.is_cuda
        and q.dtype is key.dtype is torch.bfloat16
        and 0 < len(q) <= TOKEN_TILES[-1]
        and nope % 32 == 0
        and nope <= MOST_NOPE
        and rank % COLUMNS == 0
        and rope % ALIGNED == 0
        and -(-rope // (ALIGNED * (rank // COLUMNS))) * TOKEN_TILES[-1] <= 32 * WARPS
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % ALIGNED == x.stride(1) % ALIGNED == 0 and x.stride(2) == 1 for x in (q, key))
        and cuda_driver.on_hopper(q)
    )


def can_write(new: NewRows, heads: LatentHeads) -> bool:
    """Whether the kernel can write these rows, if it supports the queries: in bfloat16, contiguous and aligned."""
    gain, columns = heads.kv_norm.weight, new.rows.shape[1]
    return (
        new.rows.dtype is new.cache.dtype is gain.dtype is torch.bfloat16
        and new.rows.is_contiguous()
        and columns % ALIGNED == (columns - heads.row_dim) % ALIGNED == 0
    )


def absorb_queries(
    q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, new: NewRows | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """Multiply the queries' first columns by the key half of `kv_b_proj` and rotate the others: queries over latent rows.

    Args:
        q: [T, H, query_dim] that the kernel `supports`; tokens and heads may be strided.
        heads: widths and rotary table.
        key: [H, nope_dim, kv_rank]; heads may be strided.
        positions: int64 [T] contiguous.
        new: rows to norm, rotate and write in the same kernel, like `write_latent`, if it `can_write` them; None to write nothing.
        pdl: start before the previous kernel has ended (programmatic dependent launch). Weights, positions, slots and rotary table are
            read before the wait. A kernel that waits before it triggers the next launch, such as the embedding kernel, must therefore run
            between the kernels that write positions and slots and this one.

    Returns:
        [T, H, row_dim] contiguous. Each token depends only on its own query, and the order of summation only on the widths.
    """
    T, H, nope, rank, rope = len(q), heads.num_heads, heads.nope_dim, heads.kv_rank, heads.rope
    assert q.shape[1:] == (H, heads.query_dim), f"expected queries [T, {H}, {heads.query_dim}]; got {tuple(q.shape)}"
    assert key.shape == (H, nope, rank), f"expected keys [{H}, {nope}, {rank}]; got {tuple(key.shape)}"
    assert key.stride(1) == rank, "the rows of a head's keys must be adjacent"
    assert positions.shape == (T,), f"expected {T} positions; got {tuple(positions.shape)}"
    out = torch.empty((T, H, heads.row_dim), dtype=q.dtype, device=q.device)
    arguments = q, key, positions, rope.cos_sin, out, T, q.stride(0), q.stride(1), key.stride(0), _latents(new, heads)
    blocks = H * (rank // COLUMNS) + (0 if new is None else T)
    _kernel(nope, rank, rope.dim, rope.interleaved, token_tile(T), new is not None, pdl)(blocks, arguments, pdl)
    return out


class _Latents(ctypes.Structure):
    """`Latents` in `absorb_queries.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "gain", "slots", "cache")),
        ("row_columns", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


def _latents(new: NewRows | None, heads: LatentHeads) -> _Latents:
    if new is None:
        return _Latents()
    T, columns = new.rows.shape
    assert can_write(new, heads), "expected contiguous rows and cache in bfloat16"
    assert new.slots.shape == (T,), f"expected {T} slots; got {tuple(new.slots.shape)}"
    assert new.cache.shape[1:] == (1, heads.row_dim), f"expected a cache of rows of {heads.row_dim} columns; got {tuple(new.cache.shape)}"
    first = new.rows[:, columns - heads.row_dim :]
    places = (first, heads.kv_norm.weight, new.slots, new.cache)
    return _Latents(*(place.data_ptr() for place in places), columns, heads.kv_norm.eps)


@cache
def _kernel(nope: int, rank: int, rope: int, interleaved: bool, tokens: int, writes: bool, pdl: bool) -> cuda_driver.Kernel:
    size = nope * 2 * COLUMNS + tokens * 64 * (nope // 32 | 1)
    text = source(nope, rank, rope, interleaved, tokens, writes, pdl)
    return cuda_driver.compile_kernel(text, "absorb_queries", threads=32 * WARPS, shared_bytes=size)


def source(nope: int, rank: int, rope: int, interleaved: bool, tokens: int, writes: bool, pdl: bool) -> str:
    """The CUDA program for these widths and at most this many tokens; `writes`: it also writes their KV rows."""
    constants = dict(
        NOPE=nope, RANK=rank, ROPE=rope, INTERLEAVED=interleaved, TOKENS=tokens, EARLY=pdl, WRITES=writes
    )  # fmt: skip
    return program(constants, Path(__file__).with_name("absorb_queries.cu"))
