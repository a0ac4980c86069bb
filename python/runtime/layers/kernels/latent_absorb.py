"""Absorbed latent attention's two GEMMs per head, for few rows: each weight is read once, before the kernel before has ended."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.layers.absorption import MAX_ROWS, ROW_TILES, absorb_by_bmm, project_by_bmm
from runtime.layers.kernels.latent_rows import load_angles, rotate_heads, rotate_pairs
from runtime.layers.kernels.pdl import launch_options
from runtime.layers.latent_heads import LatentHeads

KEY_COLUMNS, VALUE_COLUMNS = 32, 16
"""Output columns of a program with the smallest tile of rows; with a larger tile as many times more, as each program reads its rows.

Few, so that a program of 192 keys or 512 columns requests all its weights at once, 12 or 16 KB, and fits beside the kernel before it.
"""
NUM_WARPS = 4
"""Of a program: each sums a quarter of the input columns, so that no chain of multiplications is long."""


def absorb(q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, pdl: bool) -> torch.Tensor:
    """`absorb_queries`, by one kernel for few rows in 16 bits and otherwise by `torch.bmm` and a rotation."""
    if _few(q):
        return absorb_queries(q, heads, key, positions, pdl)
    query = absorb_by_bmm(q, heads, key)
    rotate_heads(q[..., heads.nope_dim :], heads.rope, positions, query[..., heads.kv_rank :], pdl)
    return query


def project(attended: torch.Tensor, value: torch.Tensor, pdl: bool) -> torch.Tensor:
    """`project_values`, by its kernel for few rows in 16 bits and otherwise by `torch.bmm`."""
    return project_values(attended, value, pdl) if _few(attended) else project_by_bmm(attended, value)


def absorb_queries(q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Multiply the queries' first columns by the key half of `kv_b_proj` and rotate the others: queries over latent rows.

    Args:
        q: [T, H, query_dim], bfloat16 or float16; rows and heads may be strided.
        heads: widths and rotary table.
        key: [H, nope_dim, kv_rank], the dtype of q; heads may be strided.
        positions: int64 [T].
        pdl: as in `triton_gemm`. `key` and `positions` are read before the wait: as in `write_latent`.

    Returns:
        [T, H, row_dim] contiguous, the dtype of q. Sums are in float32, in an order that the widths fix.
    """
    T, H, nope, rank, rope = len(q), heads.num_heads, heads.nope_dim, heads.kv_rank, heads.rope
    assert q.shape[1:] == (H, heads.query_dim), f"expected queries [T, {H}, {heads.query_dim}]; got {tuple(q.shape)}"
    assert key.shape == (H, nope, rank), f"expected keys [{H}, {nope}, {rank}]; got {tuple(key.shape)}"
    assert q.stride(2) == key.stride(2) == 1, "the columns of a head are adjacent"
    assert key.stride(1) == rank, "the rows of a head's keys are adjacent"
    out = torch.empty((T, H, heads.row_dim), dtype=q.dtype, device=q.device)
    rows, columns = _tile(T, KEY_COLUMNS)
    _absorb_kernel[(triton.cdiv(rank, columns) + 1, H, triton.cdiv(T, rows))](
        q, key, out, positions, rope.cos_sin, T, q.stride(0), q.stride(1), key.stride(0), H=H, NOPE=nope, RANK=rank, R=rope.dim,
        HALF=triton.next_power_of_2(rope.dim // 2), INTERLEAVED=rope.interleaved, BLOCK_M=rows, BLOCK_N=columns,
        PARTS=NUM_WARPS, BLOCK_K=_part(nope), PDL=pdl, num_warps=NUM_WARPS, **launch_options(pdl),
    )  # fmt: skip
    return out


def project_values(attended: torch.Tensor, value: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Multiply weighted sums of latents by the value half of `kv_b_proj`.

    Args:
        attended: [T, H, kv_rank] contiguous, bfloat16 or float16.
        value: [H, value_dim, kv_rank], the dtype of `attended`; heads may be strided.
        pdl: as in `triton_gemm`; `value` alone is read before the wait.

    Returns:
        [T, H, value_dim] contiguous, the dtype of `attended`. Sums are in float32, in an order that the widths fix.
    """
    (T, H, rank), width = attended.shape, value.shape[1]
    assert attended.is_contiguous(), "sums of latents must be contiguous"
    assert value.shape == (H, width, rank), f"expected values [{H}, value_dim, {rank}]; got {tuple(value.shape)}"
    assert value.stride()[1:] == (rank, 1), "the rows of a head's values are adjacent"
    out = torch.empty((T, H, width), dtype=attended.dtype, device=attended.device)
    rows, columns = _tile(T, VALUE_COLUMNS)
    _project_kernel[(triton.cdiv(width, columns), H, triton.cdiv(T, rows))](
        attended, value, out, T, value.stride(0), H=H, RANK=rank, WIDTH=width, BLOCK_M=rows, BLOCK_N=columns,
        PARTS=NUM_WARPS, BLOCK_K=_part(rank), PDL=pdl, num_warps=NUM_WARPS, **launch_options(pdl),
    )  # fmt: skip
    return out


def _few(x: torch.Tensor) -> bool:
    return len(x) <= MAX_ROWS and x.dtype in (torch.bfloat16, torch.float16)


def _tile(count: int, columns: int) -> tuple[int, int]:
    """Rows and columns of one program, of `count` rows: `columns` with the smallest tile."""
    rows = next((rows for rows in ROW_TILES if rows >= count), ROW_TILES[-1])
    return rows, columns * rows // ROW_TILES[0]


def _part(width: int) -> int:
    """Input columns of one warp: a power of two, at least 16 for the tensor cores."""
    return max(triton.next_power_of_2(triton.cdiv(width, NUM_WARPS)), 16)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["position_ptr"])
def _absorb_kernel(
    q_ptr, key_ptr, out_ptr, position_ptr, cos_sin_ptr, T, q_token, q_head, key_head,
    H: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some columns of one head; the last program of a head rotates."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = q_ptr + m * q_token + head * q_head
    out = out_ptr + (m * H + head) * (RANK + R)
    first = tl.program_id(0) * BLOCK_N
    if first < RANK:
        keys = key_ptr + head.to(tl.int64) * key_head
        _multiply(query, keys, out, m < T, first, NOPE, RANK, RANK, 1, BLOCK_N, PARTS, BLOCK_K, PDL)
    else:
        position = tl.load(position_ptr + m, mask=m < T, other=0)
        cos, sin = load_angles(cos_sin_ptr + position[:, None] * R, R, HALF)
        if PDL:
            gdc_wait()
        rotate_pairs(query[:, None] + NOPE, out[:, None] + RANK, cos, sin, (m < T)[:, None], R, HALF, INTERLEAVED)


@triton.jit(do_not_specialize=["T"])
def _project_kernel(
    x_ptr, value_ptr, out_ptr, T, value_head,
    H: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some columns of one head."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m * H + head
    values = value_ptr + head.to(tl.int64) * value_head
    first = tl.program_id(0) * BLOCK_N
    _multiply(x_ptr + row * RANK, values, out_ptr + row * WIDTH, m < T, first, RANK, WIDTH, 1, RANK, BLOCK_N, PARTS, BLOCK_K, PDL)


@triton.jit
def _multiply(
    rows, weights, out, m_in, first, K: tl.constexpr, N: tl.constexpr, K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` columns of `out` from `first` on: rows of K columns times `weights` [K, N]. Pointers [M] to the first columns of rows.

    All weights are requested before the wait for the kernel before. Each warp sums one of `PARTS` parts of the K columns.
    """
    part = tl.arange(0, PARTS)[:, None, None] * BLOCK_K
    n = first + tl.arange(0, BLOCK_N)
    w_k = part + tl.arange(0, BLOCK_K)[None, :, None]
    at = weights + w_k * K_STRIDE + n[None, None, :] * N_STRIDE
    if K == PARTS * BLOCK_K and N % BLOCK_N == 0:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=(w_k < K) & (n < N)[None, None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    k = part + tl.arange(0, BLOCK_K)[None, None, :]
    x = tl.load(rows[None, :, None] + k, mask=m_in[None, :, None] & (k < K), other=0.0)
    sums = tl.sum(tl.dot(x, w), 0)
    tl.store(out[:, None] + n[None, :], sums.to(out.dtype.element_ty), mask=m_in[:, None] & (n < N)[None, :])
