"""The recurrence of the gated delta rule token by token, as a Triton kernel, for windows of few tokens."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.delta.kernels.convolution import Convolved
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.mem_cache.state_pool import LayerStates, StatePass

FEW_PROGRAMS = 4096
"""Up to this many programs of one warp run at once, so that narrow parts of matrices are fastest; with more, wider parts are."""
MOST_PER_WARP = 4096
"""Entries of a matrix that the registers of one warp hold: 128 per thread."""


def advance(
    tokens: Convolved, heads: DeltaHeads, own: LayerStates, states: StatePass, qo_indptr: torch.Tensor, out: torch.Tensor, pdl: bool
) -> None:
    """Apply the pending tokens of requests with at most W tokens, and write the outputs of their tokens to `out` [T, H * value_dim]."""
    matrices, most = len(states.rows) * heads.num_value_heads, triton.next_power_of_2(heads.value_dim)
    few = matrices * triton.cdiv(heads.value_dim, 16) <= FEW_PROGRAMS
    columns = min(16 if few else 64, most)
    keys = triton.next_power_of_2(heads.key_dim)
    grid = len(states.rows), heads.num_value_heads, triton.cdiv(heads.value_dim, columns)
    _advance[grid](
        *tokens, own.matrices, states.rows, states.pending, states.fresh, qo_indptr, out, own.window_width, heads.num_key_heads,
        heads.num_value_heads, KEY=heads.key_dim, VALUE=heads.value_dim, KEYS=keys, COLUMNS=columns,
        PDL=pdl, num_warps=1 if few else max(2, keys * columns // MOST_PER_WARP), **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _advance(
    qkv, scales, gates, matrices, row_ids, pending, fresh, indptr, out, width, key_heads, heads,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the matrix of one head of one request."""
    pdl_sync(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(indptr + request).to(tl.int64)
    count = tl.load(indptr + request + 1) - start.to(tl.int32)
    if count > width:
        return
    before, is_fresh = tl.load(pending + request), tl.load(fresh + request) != 0
    base = start + request.to(tl.int64) * width
    entry = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_key, of_value = entry < KEY, column < VALUE
    both = of_key[:, None] & of_value[None, :]
    at = (tl.load(row_ids + request) * heads + head) * KEY * VALUE + entry[:, None] * VALUE + column[None, :]
    matrix = tl.load(matrices + at, mask=both & (is_fresh == 0), other=0.0)
    channels = 2 * key_heads * KEY + heads * VALUE
    key_head = head // (heads // key_heads)
    q_at = key_head * KEY + entry
    k_at, v_at = key_heads * KEY + q_at, 2 * key_heads * KEY + head * VALUE + column
    for t in range(before):
        token = base + t
        k = tl.load(qkv + token * channels + k_at, mask=of_key, other=0.0).to(tl.float32)[:, None]
        k *= tl.load(scales + token * 2 * key_heads + key_heads + key_head)
        v = tl.load(qkv + token * channels + v_at, mask=of_value, other=0.0).to(tl.float32)
        matrix *= tl.exp(tl.load(gates + token * 2 * heads + head))
        update = (v - tl.sum(matrix * k, 0)) * tl.load(gates + token * 2 * heads + heads + head)
        matrix += k * update[None, :]
    if is_fresh | (before > 0):
        tl.store(matrices + at, matrix, mask=both)
    for t in range(count):
        token = base + before + t
        k = tl.load(qkv + token * channels + k_at, mask=of_key, other=0.0).to(tl.float32)[:, None]
        k *= tl.load(scales + token * 2 * key_heads + key_heads + key_head)
        q = tl.load(qkv + token * channels + q_at, mask=of_key, other=0.0).to(tl.float32)[:, None]
        q *= tl.load(scales + token * 2 * key_heads + key_head)
        v = tl.load(qkv + token * channels + v_at, mask=of_value, other=0.0).to(tl.float32)
        matrix *= tl.exp(tl.load(gates + token * 2 * heads + head))
        update = (v - tl.sum(matrix * k, 0)) * tl.load(gates + token * 2 * heads + heads + head)
        matrix += k * update[None, :]
        result = tl.sum(matrix * q, 0).to(out.dtype.element_ty)
        tl.store(out + (start + t) * heads * VALUE + head * VALUE + column, result, mask=of_value)
