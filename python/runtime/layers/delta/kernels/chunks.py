"""The gated delta rule over long prompt chunks, 64 tokens at a time, as Triton kernels.

`_apply_chunk` of the definition has the formulas. Products with float32 numbers run on the tensor cores as sums of products with their
halves: the number rounded to 16 bits, and the rest rounded to 16 bits.
"""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.delta.definition import CHUNK
from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.delta.kernels.convolution import Convolved
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.mem_cache.state_pool import LayerStates, StatePass

COLUMNS = 16
"""Columns of a matrix that one program holds: the fewest of a product on the tensor cores."""
WARPS = 2
"""Warps of a program: with four, Triton uses WGMMA, and a variant of these kernels gave wrong results."""


def apply_chunks(
    tokens: Convolved,
    heads: DeltaHeads,
    own: LayerStates,
    states: StatePass,
    qo_indptr: torch.Tensor,
    out: torch.Tensor,
    longest: int,
    pdl: bool,
) -> None:
    """Apply the tokens of requests with more than W tokens, and those that are pending; outputs go to `out` [T, H * value_dim].

    Args:
        longest: the most tokens of a request, on the host.
    """
    requests, count, width = len(states.rows), heads.num_value_heads, own.window_width
    chunks = len(tokens.qkv) // CHUNK + requests  # of all requests together, see `_place`
    inverses, scores = torch.empty((2, chunks, count, CHUNK, CHUNK), dtype=torch.float32, device=out.device)
    sizes = {
        "KEY": heads.key_dim, "VALUE": heads.value_dim, "KEYS": triton.next_power_of_2(heads.key_dim), "CHUNK": CHUNK, "PDL": pdl,
        "num_warps": WARPS, "num_stages": 1, **launch_options(pdl),
    }  # fmt: skip
    indices = states.pending, qo_indptr
    grid = requests, triton.cdiv(width + longest, CHUNK), count
    _within_chunks[grid](*tokens, *indices, inverses, scores, width, heads.num_key_heads, count, **sizes)
    _across_chunks[(requests, count, triton.cdiv(heads.value_dim, COLUMNS))](
        *tokens, own.matrices, states.rows, states.fresh, *indices, inverses, scores, out, states.kept, states.kept_rows, width,
        heads.num_key_heads, count, COLUMNS=COLUMNS, **sizes,
    )  # fmt: skip


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """float32 `x` as a sum of two numbers of `dtype`; float32 itself has no rest."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _product(a, high, low):
    """`a @ (high + low)` in float32, with operands of one dtype."""
    if a.dtype == tl.float32:
        return tl.dot(a, high, input_precision="tf32x3")
    return tl.dot(a, low, tl.dot(a, high))


@triton.jit
def _wide_product(a, b, dtype: tl.constexpr):
    """`a @ b` of float32 numbers, for a model of `dtype`."""
    if dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    a_high, a_low = _halves(a, dtype)
    b_high, b_low = _halves(b, dtype)
    return tl.dot(a_low, b_high, _product(a_high, b_high, b_low))


@triton.jit
def _place(base, request, chunk, head, heads, CHUNK: tl.constexpr):
    """Offsets of a matrix [CHUNK, CHUNK] of one chunk and head. `base`: int64, the first row of the request in `Convolved`.

    A request has at most as many tokens as rows. So its chunks, numbered from `base // CHUNK + request`, end before the next request's.
    """
    i = tl.arange(0, CHUNK)
    return ((base // CHUNK + request + chunk) * heads + head) * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]


@triton.jit
def _within_chunks(
    qkv, scales, gates, pending, indptr, inverses, scores, width, key_heads, heads,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the inverse of the system of one chunk and head, and its decayed products of queries and keys."""
    pdl_sync(PDL)
    request, chunk, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(indptr + request).to(tl.int64)
    count = tl.load(indptr + request + 1) - start.to(tl.int32)
    left = tl.load(pending + request) + count - chunk * CHUNK
    if (count <= width) | (left <= 0):
        return
    first = start + request.to(tl.int64) * width + chunk * CHUNK
    i, entry = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    live, channels, key_head = i < left, 2 * key_heads * KEY + heads * VALUE, head // (heads // key_heads)
    q_at = (first + i[:, None]) * channels + key_head * KEY + entry[None, :]
    inside = live[:, None] & (entry < KEY)[None, :]
    q, k = tl.load(qkv + q_at, mask=inside, other=0.0), tl.load(qkv + q_at + key_heads * KEY, mask=inside, other=0.0)
    scale = scales + (first + i) * 2 * key_heads + key_head
    q_scale, k_scale = tl.load(scale, mask=live, other=0.0), tl.load(scale + key_heads, mask=live, other=0.0)
    gate = gates + (first + i) * 2 * heads + head
    total = tl.cumsum(tl.load(gate, mask=live, other=0.0), 0)
    rate = tl.load(gate + heads, mask=live, other=0.0)
    lower = i[:, None] >= i[None, :]
    ratio = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0) * k_scale[None, :]
    keys = tl.trans(k)
    at = _place(start + request.to(tl.int64) * width, request, chunk, head, heads, CHUNK)
    tl.store(scores + at, tl.dot(q, keys, input_precision="tf32x3") * ratio * q_scale[:, None])
    # Row r of the inverse of I + A is the unit row minus the rows above it, times row r of A. Here A is transposed.
    system = tl.dot(k, keys, input_precision="tf32x3") * ratio * (rate * k_scale)[:, None]
    system = tl.where(i[:, None] < i[None, :], tl.trans(system), 0.0)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, CHUNK):
        factors = tl.sum(tl.where(i[None, :] == r, system, 0.0), 1)
        row = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == r, inverse - row[None, :], inverse)
    tl.store(inverses + at, inverse)


@triton.jit
def _across_chunks(
    qkv, scales, gates, matrices, row_ids, fresh, pending, indptr, inverses, scores, out, kept, kept_rows, width, key_heads, heads,
    COLUMNS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the matrix of one head of one request, chunk after chunk."""
    pdl_sync(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(indptr + request).to(tl.int64)
    count = tl.load(indptr + request + 1) - start.to(tl.int32)
    if count <= width:
        return
    before = tl.load(pending + request)
    tokens, base = before + count, start + request.to(tl.int64) * width
    i, entry = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_key, of_value = entry < KEY, column < VALUE
    both = of_key[:, None] & of_value[None, :]
    kept_chunks, within = tl.load(kept + request) // CHUNK, entry[:, None] * VALUE + column[None, :]
    stored = (tl.load(row_ids + request) * heads + head) * KEY * VALUE + within
    matrix = tl.load(matrices + stored, mask=both & (tl.load(fresh + request) == 0), other=0.0)
    channels, key_head = 2 * key_heads * KEY + heads * VALUE, head // (heads // key_heads)
    for chunk in range(tl.cdiv(tokens, CHUNK)):
        token = chunk * CHUNK + i
        live = token < tokens
        row = base + token
        inside = live[:, None] & of_key[None, :]
        q_at = row[:, None] * channels + key_head * KEY + entry[None, :]
        q, k = tl.load(qkv + q_at, mask=inside, other=0.0), tl.load(qkv + q_at + key_heads * KEY, mask=inside, other=0.0)
        v_at = row[:, None] * channels + 2 * key_heads * KEY + head * VALUE + column[None, :]
        v = tl.load(qkv + v_at, mask=live[:, None] & of_value[None, :], other=0.0).to(tl.float32)
        scale, gate = scales + row * 2 * key_heads + key_head, gates + row * 2 * heads + head
        q_scale, k_scale = tl.load(scale, mask=live, other=0.0), tl.load(scale + key_heads, mask=live, other=0.0)
        decay, rate = tl.load(gate, mask=live, other=0.0), tl.load(gate + heads, mask=live, other=0.0)
        total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        at = _place(base, request, chunk, head, heads, CHUNK)
        high, low = _halves(matrix, qkv.dtype.element_ty)
        wanted = rate[:, None] * (v - (tl.exp(total) * k_scale)[:, None] * _product(k, high, low))
        result = (tl.exp(total) * q_scale)[:, None] * _product(q, high, low)
        updates = _wide_product(tl.load(inverses + at), wanted, qkv.dtype.element_ty)
        result += _wide_product(tl.load(scores + at), updates, qkv.dtype.element_ty)
        out_at = (start + token - before)[:, None] * heads * VALUE + head * VALUE + column[None, :]
        is_new = live & (token >= before)
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=is_new[:, None] & of_value[None, :])
        high, low = _halves(updates * (tl.exp(last - total) * k_scale)[:, None], qkv.dtype.element_ty)
        matrix = matrix * tl.exp(last) + _product(tl.trans(k), high, low)
        if chunk + 1 == kept_chunks:
            copy = (tl.load(kept_rows + request) * heads + head) * KEY * VALUE + within
            tl.store(matrices + copy, matrix, mask=both)
    tl.store(matrices + stored, matrix, mask=both)
