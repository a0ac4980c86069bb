"""Head norms, rotary embedding and the KV write as one Triton kernel, between the qkv GEMM and attention."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.finite import finite
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.rope import RotaryHeads

MAX_HEADS = 8
"""Maximum heads per program."""


def rope_and_cache(
    qkv: torch.Tensor,
    heads: RotaryHeads,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    pdl: bool,
) -> torch.Tensor:
    """Norm q and k per head if `heads` has norms, rotate them, write k and v to their slots and return q.

    Args:
        qkv: [T, (H + 2 G) * D] contiguous; or [T, (H + G) * D] if values are the keys before norm and rotation.
        heads: H, G, D, the rotary table of the first R entries of a head, and the norms; the norm of v must have a weight of ones.
        positions, out_cache_loc: int64 [T].
        kv_cache: keys and values, each [num_slots, G, D] contiguous; written.
        pdl: as in `triton_gemm`.

    Returns:
        q [T, H, D], the dtype of qkv.
    """
    q_norm, k_norm, (k_cache, v_cache) = heads.q_norm, heads.k_norm, kv_cache
    assert (q_norm is None) == (k_norm is None), "expected both q_norm and k_norm, or none"
    H, G, D = heads.num_q_heads, heads.num_kv_heads, heads.head_dim
    T, rope = qkv.shape[0], heads.rope
    q = torch.empty((T, H, D), dtype=qkv.dtype, device=qkv.device)
    together = min(math.gcd(H, G) & -math.gcd(H, G), MAX_HEADS)  # a power of two that divides both
    _rope_kernel[(T, (H + 2 * G) // together)](
        qkv, q, k_cache, v_cache, positions, out_cache_loc, rope.cos_sin,
        q_norm.weight if q_norm else None, k_norm.weight if k_norm else None, q_norm.eps if q_norm else 0.0, k_norm.eps if k_norm else 0.0,
        heads.v_norm.eps if heads.v_norm else 0.0, heads.kv_scales,
        H=H, G=G, D=D, R=rope.dim, INTERLEAVED=rope.interleaved, HALF=triton.next_power_of_2(D // 2), HEADS=together,
        NORM=q_norm is not None, V_NORM=heads.v_norm is not None, SHARED=heads.shared_kv, SCALED=heads.kv_scales is not None, PDL=pdl,
        num_warps=4 if together * D >= 512 else 2, **launch_options(pdl),
    )  # fmt: skip
    return q


@triton.jit
def _stored(x, cache_ptr, scales_ptr, which: tl.constexpr, SCALED: tl.constexpr):
    """The value of `x` to store: without NaN and infinity and, with scales, divided by its scale and clamped to the range of e4m3."""
    if SCALED:
        kept = tl.minimum(tl.maximum(finite(x.to(tl.float32) / tl.load(scales_ptr + which)), -448.0), 448.0)
        return kept.to(cache_ptr.dtype.element_ty)
    return finite(x.to(cache_ptr.dtype.element_ty))


@triton.jit
def _rope_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, position_ptr, slot_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, q_eps, k_eps, v_eps, scales_ptr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, V_NORM: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program processes some heads of one token: only queries, only keys or only values."""
    pdl_sync(PDL)
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    inside = (d < D // 2)[None, :]
    # The two entries of pair d. Pairs from R / 2 on are not rotated.
    low_at, high_at = d, D // 2 + d
    if R < D:
        low_at = tl.where(d < R // 2, d, d + R // 2)
        high_at = low_at + tl.where(d < R // 2, R // 2, (D - R) // 2)
    if INTERLEAVED:
        low_at = tl.where(d < R // 2, 2 * d, low_at)
        high_at = tl.where(d < R // 2, 2 * d + 1, high_at)
    if SHARED:
        source = qkv_ptr + t * ((H + G) * D) + tl.where(first >= H + G, head - G, head)[:, None] * D
    else:
        source = qkv_ptr + t * ((H + 2 * G) * D) + head[:, None] * D
    low = tl.load(source + low_at[None, :], mask=inside, other=0.0)
    high = tl.load(source + high_at[None, :], mask=inside, other=0.0)
    slot = tl.load(slot_ptr + t)
    if first >= H + G:
        if V_NORM:
            x, y = low.to(tl.float32), high.to(tl.float32)
            scale = (1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + v_eps))[:, None]
            low, high = (x * scale).to(low.dtype), (y * scale).to(high.dtype)
        value, value_high = _stored(low, v_ptr, scales_ptr, 1, SCALED), _stored(high, v_ptr, scales_ptr, 1, SCALED)
        value_at = v_ptr + slot * (G * D) + (head - (H + G))[:, None] * D
        tl.store(value_at + low_at[None, :], value, mask=inside)
        tl.store(value_at + high_at[None, :], value_high, mask=inside)
    else:
        x, y = low.to(tl.float32), high.to(tl.float32)
        half_in = d < D // 2
        if NORM:
            is_q = first < H
            mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D
            scale = (1.0 / tl.sqrt(mean + tl.where(is_q, q_eps, k_eps)))[:, None]
            gain = tl.load(q_norm_ptr + low_at, mask=half_in & is_q, other=0.0)
            gain += tl.load(k_norm_ptr + low_at, mask=half_in & (first >= H), other=0.0)
            gain_high = tl.load(q_norm_ptr + high_at, mask=half_in & is_q, other=0.0)
            gain_high += tl.load(k_norm_ptr + high_at, mask=half_in & (first >= H), other=0.0)
            x = x * scale * gain.to(tl.float32)[None, :]
            y = y * scale * gain_high.to(tl.float32)[None, :]
        angle = cos_sin_ptr + tl.load(position_ptr + t) * R + d
        cos = tl.load(angle, mask=d < R // 2, other=1.0)[None, :]
        sin = tl.load(angle + R // 2, mask=d < R // 2, other=0.0)[None, :]
        rotated, rotated_high = x * cos - y * sin, y * cos + x * sin
        if first < H:
            query_at = q_ptr + t * (H * D) + head[:, None] * D
            tl.store(query_at + low_at[None, :], rotated.to(q_ptr.dtype.element_ty), mask=inside)
            tl.store(query_at + high_at[None, :], rotated_high.to(q_ptr.dtype.element_ty), mask=inside)
        else:
            key = _stored(rotated.to(q_ptr.dtype.element_ty), k_ptr, scales_ptr, 0, SCALED)
            key_high = _stored(rotated_high.to(q_ptr.dtype.element_ty), k_ptr, scales_ptr, 0, SCALED)
            key_at = k_ptr + slot * (G * D) + (head - H)[:, None] * D
            tl.store(key_at + low_at[None, :], key, mask=inside)
            tl.store(key_at + high_at[None, :], key_high, mask=inside)
