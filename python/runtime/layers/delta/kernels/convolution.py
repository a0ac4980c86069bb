"""The convolution and the gates of the gated delta rule, as Triton kernels.

They write all tokens that the recurrence applies: of each request the pending ones of its latest window, then those of the pass, without
gaps. With windows of up to W tokens, the tokens of request b begin at row `qo_indptr[b] + b * W`.
"""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runtime.layers.delta.definition import NORM_EPS
from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.mem_cache.state_pool import LayerStates, StatePass

TILE = 16
"""Tokens of a prompt that one program convolves."""


class Convolved(NamedTuple):
    """The tokens of a pass and those that are pending, in T + B * W rows.

    Attributes:
        qkv: [T + B * W, C] in the model's dtype: queries, keys and values.
        scales: float32 [T + B * W, 2 * G]: factors that give each query and key length 1, for queries divided by sqrt(key_dim).
        gates: float32 [T + B * W, 2, H]: the logarithm of the decay, and the rate.
    """

    qkv: torch.Tensor
    scales: torch.Tensor
    gates: torch.Tensor


def convolve(
    rows: torch.Tensor,
    gates: torch.Tensor,
    heads: DeltaHeads,
    own: LayerStates,
    states: StatePass,
    qo_indptr: torch.Tensor,
    longest: int,
    pdl: bool,
) -> Convolved:
    """Convolve the tokens of B requests, and store windows of up to W tokens, or the last inputs of longer chunks.

    Args:
        rows: [T, C], of any row stride.
        gates: [T, 2 * H], contiguous.
        qo_indptr: int32 [B + 1].
        longest: the most tokens of a request, on the host.
    """
    requests, width, channels, dtype = len(states.rows), own.window_width, heads.channels, torch.float32
    count = len(rows) + requests * width
    out = Convolved(
        torch.empty((count, channels), dtype=rows.dtype, device=rows.device),
        torch.empty((count, 2 * heads.num_key_heads), dtype=dtype, device=rows.device),
        torch.empty((count, 2, heads.num_value_heads), dtype=dtype, device=rows.device),
    )
    parts = 2 * heads.num_key_heads + heads.num_value_heads + 1
    pointers = (
        rows, rows.stride(0), gates, heads.conv_weight, heads.decay_log, heads.decay_bias, own.tail, own.window, own.gates, states.rows,
        states.pending, states.fresh, qo_indptr, *out, width, heads.num_key_heads, heads.num_value_heads,
    )  # fmt: skip
    sizes = {
        "KEY": heads.key_dim, "VALUE": heads.value_dim, "CONV": heads.conv_width, "EPS": NORM_EPS, "PDL": pdl,
        "BLOCK": triton.next_power_of_2(max(heads.key_dim, heads.value_dim)), "HEADS": triton.next_power_of_2(heads.num_value_heads),
    }  # fmt: skip
    options = launch_options(pdl)
    _convolve_windows[(requests, parts)](*pointers, **sizes, num_warps=1, **options)
    if longest > width:
        _convolve_chunks[(requests, triton.cdiv(width + longest, TILE), parts)](*pointers, **sizes, TILE=TILE, num_warps=4, **options)
        _store_tails[(requests, parts - 1)](states.kept, states.kept_rows, *pointers, **sizes, num_warps=1, **options)
    return out


@triton.jit
def _channels(part, key_heads, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """The first channel of a head, and which of `BLOCK` columns belong to it: query heads, key heads, then value heads."""
    is_key = part < 2 * key_heads
    first = tl.where(is_key, part * KEY, 2 * key_heads * KEY + (part - 2 * key_heads) * VALUE)
    return first, tl.arange(0, BLOCK) < tl.where(is_key, KEY, VALUE)


@triton.jit
def _decay_and_rate(raw_gates, token, inside, head, heads, decay_log, decay_bias):
    """The logarithm of the decay, and the rate, of each head of a token."""
    rate = tl.load(raw_gates + token * 2 * heads + head, mask=inside, other=0.0).to(tl.float32)
    decay = tl.load(raw_gates + token * 2 * heads + heads + head, mask=inside, other=0.0).to(tl.float32)
    decay += tl.load(decay_bias + head, mask=inside, other=0.0)
    # log(1 + x) of a small x: the quotient makes up for the bits that 1 + x loses.
    x = tl.exp(-tl.abs(decay))
    y = 1.0 + x
    softplus = tl.maximum(decay, 0.0) + tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))
    return -tl.exp(tl.load(decay_log + head, mask=inside, other=0.0)) * softplus, 1.0 / (1.0 + tl.exp(-rate))


@triton.jit
def _finish(sums, part, key_heads, axis: tl.constexpr, KEY: tl.constexpr, EPS: tl.constexpr, dtype: tl.constexpr):
    """SiLU in the model's dtype, and the factor that gives a key length 1, or a query the length 1 / sqrt(key_dim)."""
    y = (sums / (1.0 + tl.exp(-sums))).to(dtype)
    wide = y.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis) + EPS)
    return y, tl.where(part < key_heads, scale * (1.0 / (KEY**0.5)), scale)


@triton.jit
def _convolve_windows(
    rows, row_stride, raw_gates, weight, decay_log, decay_bias, tail, window, stored_gates, row_ids, pending, fresh, indptr, out,
    out_scales, out_gates, width, key_heads, heads, KEY: tl.constexpr, VALUE: tl.constexpr, CONV: tl.constexpr, EPS: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program: one head's channels, or the gates, of a request of up to `width` tokens. It alone reads and writes their state."""
    pdl_sync(PDL)
    request, part, last = tl.program_id(0), tl.program_id(1), tl.num_programs(1) - 1
    row = tl.load(row_ids + request)
    start = tl.load(indptr + request).to(tl.int64)
    count = tl.load(indptr + request + 1) - start.to(tl.int32)
    if count > width:
        return
    before = tl.load(pending + request)
    base = start + request.to(tl.int64) * width
    if part == last:
        head = tl.arange(0, HEADS)
        inside = head < heads
        for t in range(before):
            stored, at = (row * width + t) * 2 * heads + head, (base + t) * 2 * heads + head
            tl.store(out_gates + at, tl.load(stored_gates + stored, mask=inside), mask=inside)
            tl.store(out_gates + at + heads, tl.load(stored_gates + stored + heads, mask=inside), mask=inside)
        for t in range(count):
            stored, at = (row * width + t) * 2 * heads + head, (base + before + t) * 2 * heads + head
            decay, rate = _decay_and_rate(raw_gates, start + t, inside, head, heads, decay_log, decay_bias)
            tl.store(out_gates + at, decay, mask=inside)
            tl.store(out_gates + at + heads, rate, mask=inside)
            tl.store(stored_gates + stored, decay, mask=inside)
            tl.store(stored_gates + stored + heads, rate, mask=inside)
        return
    channels = 2 * key_heads * KEY + heads * VALUE
    first, inside = _channels(part, key_heads, KEY, VALUE, BLOCK)
    channel = first + tl.arange(0, BLOCK)
    known = inside & (tl.load(fresh + request) == 0)
    # Inputs and weights of the tokens three, two and one before the current one; weights are 0 where the convolution is narrower.
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    w0 = tl.zeros([BLOCK], tl.float32)
    w1 = tl.zeros([BLOCK], tl.float32)
    if CONV > 3:
        a = tl.load(tail + (row * (CONV - 1) + CONV - 4) * channels + channel, mask=known, other=0.0).to(tl.float32)
        w0 = tl.load(weight + channel * CONV + CONV - 4, mask=inside, other=0.0).to(tl.float32)
    if CONV > 2:
        b = tl.load(tail + (row * (CONV - 1) + CONV - 3) * channels + channel, mask=known, other=0.0).to(tl.float32)
        w1 = tl.load(weight + channel * CONV + CONV - 3, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(tail + (row * (CONV - 1) + CONV - 2) * channels + channel, mask=known, other=0.0).to(tl.float32)
    w2 = tl.load(weight + channel * CONV + CONV - 2, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(weight + channel * CONV + CONV - 1, mask=inside, other=0.0).to(tl.float32)
    for t in range(before):
        x = tl.load(window + (row * width + t) * channels + channel, mask=inside, other=0.0).to(tl.float32)
        y, scale = _finish(a * w0 + b * w1 + c * w2 + x * w3, part, key_heads, 0, KEY, EPS, rows.dtype.element_ty)
        tl.store(out + (base + t) * channels + channel, y, mask=inside)
        tl.store(out_scales + (base + t) * 2 * key_heads + part, scale, mask=part < 2 * key_heads)
        a, b, c = b, c, x
    if CONV > 3:
        tl.store(tail + (row * (CONV - 1) + CONV - 4) * channels + channel, a.to(tail.dtype.element_ty), mask=inside)
    if CONV > 2:
        tl.store(tail + (row * (CONV - 1) + CONV - 3) * channels + channel, b.to(tail.dtype.element_ty), mask=inside)
    tl.store(tail + (row * (CONV - 1) + CONV - 2) * channels + channel, c.to(tail.dtype.element_ty), mask=inside)
    for t in range(count):
        value = tl.load(rows + (start + t) * row_stride + channel, mask=inside, other=0.0)
        x = value.to(tl.float32)
        y, scale = _finish(a * w0 + b * w1 + c * w2 + x * w3, part, key_heads, 0, KEY, EPS, rows.dtype.element_ty)
        tl.store(out + (base + before + t) * channels + channel, y, mask=inside)
        tl.store(out_scales + (base + before + t) * 2 * key_heads + part, scale, mask=part < 2 * key_heads)
        tl.store(window + (row * width + t) * channels + channel, value, mask=inside)
        a, b, c = b, c, x


@triton.jit
def _input(
    token, before, start, row, channel, inside, known, rows, row_stride, tail, window, width, channels, CONV: tl.constexpr
):  # fmt: skip
    """The inputs of tokens of a request, counted from its first pending one, in float32: from the tail, the window or the pass."""
    old = tl.load(tail + (row * (CONV - 1) + CONV - 1 + token) * channels + channel, mask=known & (token < 0), other=0.0)
    stored = tl.load(window + (row * width + token) * channels + channel, mask=inside & (token >= 0) & (token < before), other=0.0)
    new = tl.load(rows + (start + token - before) * row_stride + channel, mask=inside & (token >= before), other=0.0)
    return old.to(tl.float32) + stored.to(tl.float32) + new.to(tl.float32)


@triton.jit
def _convolve_chunks(
    rows, row_stride, raw_gates, weight, decay_log, decay_bias, tail, window, stored_gates, row_ids, pending, fresh, indptr, out,
    out_scales, out_gates, width, key_heads, heads, KEY: tl.constexpr, VALUE: tl.constexpr, CONV: tl.constexpr, EPS: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: one head's channels, or the gates, of some tokens of a request of more than `width` tokens."""
    pdl_sync(PDL)
    request, part, last = tl.program_id(0), tl.program_id(2), tl.num_programs(2) - 1
    row = tl.load(row_ids + request)
    start = tl.load(indptr + request).to(tl.int64)
    count = tl.load(indptr + request + 1) - start.to(tl.int32)
    before = tl.load(pending + request)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    if (count <= width) | (tl.program_id(1) * TILE >= before + count):
        return
    base = start + request.to(tl.int64) * width
    live = token < before + count
    if part == last:
        head = tl.arange(0, HEADS)[None, :]
        inside = live & (head < heads)
        old, new = inside & (token < before), inside & (token >= before)
        decay, rate = _decay_and_rate(raw_gates, start + token - before, new, head, heads, decay_log, decay_bias)
        stored, at = (row * width + token) * 2 * heads + head, (base + token) * 2 * heads + head
        tl.store(out_gates + at, tl.where(new, decay, tl.load(stored_gates + stored, mask=old, other=0.0)), mask=inside)
        tl.store(out_gates + at + heads, tl.where(new, rate, tl.load(stored_gates + stored + heads, mask=old, other=0.0)), mask=inside)
        return
    channels = 2 * key_heads * KEY + heads * VALUE
    first, inside = _channels(part, key_heads, KEY, VALUE, BLOCK)
    channel = first + tl.arange(0, BLOCK)[None, :]
    inside = live & inside[None, :]
    known = inside & (tl.load(fresh + request) == 0)
    sums = tl.zeros([TILE, BLOCK], tl.float32)
    for i in tl.static_range(CONV):
        x = _input(
            token - (CONV - 1 - i), before, start, row, channel, inside, known, rows, row_stride, tail, window, width, channels, CONV
        )
        sums += x * tl.load(weight + channel * CONV + i, mask=inside, other=0.0).to(tl.float32)
    y, scale = _finish(sums, part, key_heads, 1, KEY, EPS, rows.dtype.element_ty)
    tl.store(out + (base + token) * channels + channel, y, mask=inside)
    tl.store(out_scales + (base + token) * 2 * key_heads + part, scale[:, None], mask=live & (part < 2 * key_heads))


@triton.jit
def _store_tails(
    kept, kept_rows, rows, row_stride, raw_gates, weight, decay_log, decay_bias, tail, window, stored_gates, row_ids, pending, fresh,
    indptr, out, out_scales, out_gates, width, key_heads, heads, KEY: tl.constexpr, VALUE: tl.constexpr, CONV: tl.constexpr,
    EPS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program: the last inputs of one head's channels, of a request of more than `width` tokens, and those where a copy is kept."""
    pdl_sync(PDL)
    request = tl.program_id(0)
    row = tl.load(row_ids + request)
    start = tl.load(indptr + request).to(tl.int64)
    count = tl.load(indptr + request + 1) - start.to(tl.int32)
    if count <= width:
        return
    channels = 2 * key_heads * KEY + heads * VALUE
    first, inside = _channels(tl.program_id(1), key_heads, KEY, VALUE, BLOCK)
    channel = first + tl.arange(0, BLOCK)
    before = tl.load(pending + request)
    known = inside & (tl.load(fresh + request) == 0)
    copied = tl.load(kept + request)
    if copied > 0:  # nothing is pending, and all these inputs are the pass's own
        copy = tl.load(kept_rows + request)
        for i in tl.static_range(CONV - 1):
            value = tl.load(rows + (start + copied - (CONV - 1) + i) * row_stride + channel, mask=inside, other=0.0)
            tl.store(tail + (copy * (CONV - 1) + i) * channels + channel, value, mask=inside)
    first_kept = before + count - (CONV - 1)
    for i in tl.static_range(CONV - 1):  # an input of the old tail moves to the front, so that none is read after it is overwritten
        value = _input(first_kept + i, before, start, row, channel, inside, known, rows, row_stride, tail, window, width, channels, CONV)
        tl.store(tail + (row * (CONV - 1) + i) * channels + channel, value.to(tail.dtype.element_ty), mask=inside)
