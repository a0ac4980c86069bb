"""The kernels between latent attention's GEMMs: norms, rotation and KV write of the latent rows, and rotation of the queries."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.layers.kernels.finite import finite
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.rope import Rope

MAX_HEADS = 8
"""Maximum heads per program."""


def write_latent(
    rows: torch.Tensor, heads: LatentHeads, positions: torch.Tensor, out_cache_loc: torch.Tensor, cache: torch.Tensor, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm the latents of queries and keys, rotate the shared key, and write the KV rows to their slots.

    Args:
        rows: [T, q_columns + row_dim] contiguous.
        heads: widths, norms and rotary table.
        positions, out_cache_loc: int64 [T].
        cache: [num_slots, 1, row_dim] contiguous; written.
        pdl: as in `triton_gemm`. Weights, positions and slots are read before the wait. A kernel that waits before it triggers the next
            launch, such as the embedding kernel, must therefore run between the kernels that write them and this one.

    Returns:
        The queries' columns [T, q_columns], normed if they are a latent and otherwise a view of `rows`, and the KV rows [T, row_dim]
        contiguous.
    """
    T, rank, rope, q_norm = len(rows), heads.kv_rank, heads.rope, heads.q_norm
    kv = torch.empty((T, heads.row_dim), dtype=rows.dtype, device=rows.device)
    q = rows[:, : heads.q_columns]
    if q_norm is not None:
        q = torch.empty((T, heads.q_columns), dtype=rows.dtype, device=rows.device)
    _write_kernel[(T, 1 if q_norm is None else 2)](
        rows, q, kv, cache, positions, out_cache_loc, rope.cos_sin, heads.kv_norm.weight, q_norm.weight if q_norm else None,
        heads.kv_norm.eps, q_norm.eps if q_norm else 0.0,
        Q=heads.q_columns, RANK=rank, R=rope.dim, BLOCK_Q=triton.next_power_of_2(heads.q_columns) if q_norm else 1,
        BLOCK_RANK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(rope.dim // 2), INTERLEAVED=rope.interleaved,
        NORM_Q=q_norm is not None, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return q, kv


def rotate_heads(x: torch.Tensor, rope: Rope, positions: torch.Tensor, out: torch.Tensor, pdl: bool) -> None:
    """Rotate `x` [T, H, R] by `positions` int64 [T] into `out` of the same shape, which may be `x`; rows are contiguous in both."""
    T, H, R = x.shape
    assert x.stride(2) == out.stride(2) == 1, "the columns of a head must be adjacent"
    _rotate_kernel[(T, triton.cdiv(H, MAX_HEADS))](
        x, out, positions, rope.cos_sin, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        H=H, R=R, HALF=triton.next_power_of_2(R // 2), HEADS=MAX_HEADS, INTERLEAVED=rope.interleaved, PDL=pdl, num_warps=2,
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _write_kernel(
    rows_ptr, q_ptr, kv_ptr, cache_ptr, position_ptr, slot_ptr, cos_sin_ptr, kv_norm_ptr, q_norm_ptr, kv_eps, q_eps,
    Q: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_RANK: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program processes the KV row of one token, or its queries."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    row = rows_ptr + t * (Q + RANK + R)
    if tl.program_id(1) == 0:
        kv, latent = kv_ptr + t * (RANK + R), row + Q
        _write_row(
            latent, kv, cache_ptr, position_ptr + t, slot_ptr + t, cos_sin_ptr, kv_norm_ptr, kv_eps, RANK, R, BLOCK_RANK, HALF,
            INTERLEAVED, PDL,
        )  # fmt: skip
    else:
        if NORM_Q:  # a compile-time condition: without a norm there are no such programs and no weight
            _norm_queries(row, q_ptr + t * Q, q_norm_ptr, q_eps, Q, BLOCK_Q, PDL)


@triton.jit
def _norm_queries(row, out, norm_ptr, eps, Q: tl.constexpr, BLOCK_Q: tl.constexpr, PDL: tl.constexpr):
    column = tl.arange(0, BLOCK_Q)
    inside = column < Q
    gain = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / Q + eps)) * gain
    tl.store(out + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write_row(
    row, kv, cache_ptr, position_ptr, slot_ptr, cos_sin_ptr, norm_ptr, eps, RANK: tl.constexpr, R: tl.constexpr,
    BLOCK_RANK: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm the latent, rotate the key after it, store both in `kv` and in the token's slot. All loads precede all stores."""
    column = tl.arange(0, BLOCK_RANK)
    inside = column < RANK
    gain = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.arange(0, HALF)
    half_in = d < R // 2
    low_at, high_at = d, d + R // 2
    if INTERLEAVED:
        low_at, high_at = 2 * d, 2 * d + 1
    angle = cos_sin_ptr + tl.load(position_ptr) * R + d
    stored = cache_ptr + tl.load(slot_ptr) * (RANK + R)
    cos = tl.load(angle, mask=half_in, other=1.0)
    sin = tl.load(angle + R // 2, mask=half_in, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(row + RANK + low_at, mask=half_in, other=0.0).to(tl.float32)
    high = tl.load(row + RANK + high_at, mask=half_in, other=0.0).to(tl.float32)
    dtype: tl.constexpr = kv.dtype.element_ty
    normed = (x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps)) * gain).to(dtype)
    first, second = (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
    tl.store(kv + column, normed, mask=inside)
    tl.store(kv + RANK + low_at, first, mask=half_in)
    tl.store(kv + RANK + high_at, second, mask=half_in)
    tl.store(stored + column, finite(normed.to(cache_ptr.dtype.element_ty)), mask=inside)
    tl.store(stored + RANK + low_at, finite(first.to(cache_ptr.dtype.element_ty)), mask=half_in)
    tl.store(stored + RANK + high_at, finite(second.to(cache_ptr.dtype.element_ty)), mask=half_in)


@triton.jit
def _rotate_kernel(
    x_ptr, out_ptr, position_ptr, cos_sin_ptr, x_token, x_head, out_token, out_head,
    H: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program processes some heads of one token."""
    pdl_sync(PDL)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    source = x_ptr + t * x_token + head[:, None] * x_head
    target = out_ptr + t * out_token + head[:, None] * out_head
    cos, sin = load_angles(cos_sin_ptr + tl.load(position_ptr + t) * R, R, HALF)
    rotate_pairs(source, target, cos, sin, (head < H)[:, None], R, HALF, INTERLEAVED)


@triton.jit
def load_angles(rows, R: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines [N, HALF] of rows of the rotary table: a pointer to one row, or pointers [N, 1]."""
    d = tl.arange(0, HALF)[None, :]
    return tl.load(rows + d, mask=d < R // 2, other=1.0), tl.load(rows + d + R // 2, mask=d < R // 2, other=0.0)


@triton.jit
def rotate_pairs(source, target, cos, sin, inside, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate `R` columns from `source` to `target`, pointers [N, 1] to first columns; `inside` [N, 1]: the rows that exist."""
    dtype: tl.constexpr = target.dtype.element_ty
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(source + d, mask=inside & (d < R), other=0.0).to(tl.float32)
        low, high = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
        rotated = tl.join(low * cos - high * sin, high * cos + low * sin)
        tl.store(target + d, tl.reshape(rotated, (x.shape[0], 2 * HALF)).to(dtype), mask=inside & (d < R))
    else:
        d = tl.arange(0, HALF)[None, :]
        pairs_in = inside & (d < R // 2)
        low = tl.load(source + d, mask=pairs_in, other=0.0).to(tl.float32)
        high = tl.load(source + d + R // 2, mask=pairs_in, other=0.0).to(tl.float32)
        tl.store(target + d, (low * cos - high * sin).to(dtype), mask=pairs_in)
        tl.store(target + d + R // 2, (high * cos + low * sin).to(dtype), mask=pairs_in)
