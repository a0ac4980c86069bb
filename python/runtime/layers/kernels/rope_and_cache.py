"""What happens between the fused qkv product and attention, as one Triton kernel."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from runtime.layers.gemm.triton_gemm import start_early
from runtime.layers.ops import HeadLayout, RMSNorm, Rope

MAX_HEADS = 8
"""Heads of one program."""


def rope_into_cache(
    qkv: torch.Tensor,
    layout: HeadLayout,
    rope: Rope,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pdl: bool,
) -> torch.Tensor:
    """As `BlockOps.rope_and_cache`: qkv [T, (H + 2 G) * D] contiguous -> q [T, H, D]; caches [num_slots, G, D] contiguous.

    Both norms or none. `pdl` as in `small_gemm`.
    """
    assert (q_norm is None) == (k_norm is None), "query and key norms come together"
    H, G, D = layout.num_q_heads, layout.num_kv_heads, layout.head_dim
    T = qkv.shape[0]
    q = torch.empty((T, H, D), dtype=qkv.dtype, device=qkv.device)
    heads = min(math.gcd(H, G) & -math.gcd(H, G), MAX_HEADS)  # a power of two that divides both
    launch = {"launch_pdl": True} if pdl else {}
    _rope_kernel[(T, (H + 2 * G) // heads)](
        qkv, q, k_cache, v_cache, positions, out_cache_loc, rope.cos_sin,
        q_norm.weight if q_norm else None, k_norm.weight if k_norm else None, q_norm.eps if q_norm else 0.0, k_norm.eps if k_norm else 0.0,
        H=H, G=G, D=D, HALF=triton.next_power_of_2(D // 2), HEADS=heads, NORM=q_norm is not None, PDL=pdl,
        num_warps=4 if heads * D >= 512 else 2, **launch,
    )  # fmt: skip
    return q


@triton.jit
def _rope_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, position_ptr, slot_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, q_eps, k_eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some heads, all of one kind, of one token."""
    start_early(PDL)
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    inside = (d < D // 2)[None, :]
    source = qkv_ptr + t * ((H + 2 * G) * D) + head[:, None] * D + d[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + D // 2, mask=inside, other=0.0)
    slot = tl.load(slot_ptr + t)
    if first >= H + G:
        target = v_ptr + slot * (G * D) + (head - (H + G))[:, None] * D + d[None, :]
        tl.store(target, low.to(v_ptr.dtype.element_ty), mask=inside)
        tl.store(target + D // 2, high.to(v_ptr.dtype.element_ty), mask=inside)
    else:
        x, y = low.to(tl.float32), high.to(tl.float32)
        half_in = d < D // 2
        if NORM:
            is_q = first < H
            mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D
            scale = (1.0 / tl.sqrt(mean + tl.where(is_q, q_eps, k_eps)))[:, None]
            gain = tl.load(q_norm_ptr + d, mask=half_in & is_q, other=0.0) + tl.load(k_norm_ptr + d, mask=half_in & (first >= H), other=0.0)
            gain_high = tl.load(q_norm_ptr + D // 2 + d, mask=half_in & is_q, other=0.0)
            gain_high += tl.load(k_norm_ptr + D // 2 + d, mask=half_in & (first >= H), other=0.0)
            x = x * scale * gain.to(tl.float32)[None, :]
            y = y * scale * gain_high.to(tl.float32)[None, :]
        angle = cos_sin_ptr + tl.load(position_ptr + t) * D + d
        cos = tl.load(angle, mask=half_in, other=0.0)[None, :]
        sin = tl.load(angle + D // 2, mask=half_in, other=0.0)[None, :]
        turned, turned_high = x * cos - y * sin, y * cos + x * sin
        if first < H:
            target = q_ptr + t * (H * D) + head[:, None] * D + d[None, :]
            tl.store(target, turned.to(q_ptr.dtype.element_ty), mask=inside)
            tl.store(target + D // 2, turned_high.to(q_ptr.dtype.element_ty), mask=inside)
        else:
            target = k_ptr + slot * (G * D) + (head - H)[:, None] * D + d[None, :]
            tl.store(target, turned.to(k_ptr.dtype.element_ty), mask=inside)
            tl.store(target + D // 2, turned_high.to(k_ptr.dtype.element_ty), mask=inside)
