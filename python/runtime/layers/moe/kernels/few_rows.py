"""Experts for few tokens, as in decoding: two kernels that read each weight of the selected experts once.

They run the dtypes and shapes that `fragment_rows` does not support.
There is no sort and no atomic operation: programs find the selected experts in the routing's bit masks, and every token is a column of the
tensor cores' right operand, with zeros if it is not routed to the expert. One graph is valid for any routing.
"""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.config.kernel_configs import StepConfig
from runtime.layers.gemm.deferred_norm import DeferredNorm, deferred_buffers
from runtime.layers.gemm.triton_gemm import sum_rows
from runtime.layers.kernels.fragments import FORMATS
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.kernels.weight_step import dot_step, row_pointers
from runtime.layers.moe.kernels.expert_pass import ExpertPass
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gate import apply_gate

MAX_ROWS = 64
"""Maximum tokens."""


def experts_in_triton(
    experts: ExpertPass, configs: tuple[StepConfig, StepConfig], *, add: bool = False, deferred: DeferredNorm | None = None
) -> torch.Tensor:
    """Run a pass of at most `MAX_ROWS` tokens; returns its `out`.

    Args:
        configs: the tilings of the two kernels.
        add: add to `out` instead of overwriting it.
        deferred: with `add`: additional outputs for the norm that reads `out` next; `configs[1].parts(hidden)` squares per row.

    The order of sums depends only on the shapes, the routing of all tokens and `configs`.
    """
    x, gate_up, down, routed, act, out, first, pdl, *_ = experts
    (T, hidden), (E, N, _), top_k = x.shape, gate_up.shape, routed.ids.shape[1]
    assert 0 < T <= MAX_ROWS, f"expected 1 to {MAX_ROWS} rows; got {T}"
    experts.check()
    inner, slots, block_m = N // 2, min(E, T * top_k), max(8, triton.next_power_of_2(T))
    h = torch.empty((T * top_k, inner), dtype=x.dtype, device=x.device)
    # For each slot: the expert, then the index of each token's pair in h, or -1. The last entry is the number of slots.
    plan = torch.empty(slots * (block_m + 1) + 1, dtype=torch.int32, device=x.device)
    up, last = (_fit(config, weights) for config, weights in zip(configs, (gate_up, down), strict=True))
    common = dict(BLOCK_M=block_m, TOP_K=top_k, PTX=x.is_cuda and x.dtype is torch.bfloat16, PDL=pdl, **launch_options(pdl))
    _up_kernel[(triton.cdiv(inner, up.block_n // 2), slots)](
        x, routed.ids, routed.weights, routed.masks, gate_up.weight, gate_up.scale, gate_up.bias, h, plan,
        T, inner, hidden, E, first, routed.masks.shape[1], *gate_up.scale_layout, act.alpha, act.limit,
        E_PAD=triton.next_power_of_2(E), TOP_PAD=triton.next_power_of_2(top_k), KIND=act.kind, BIAS=gate_up.bias is not None,
        EVEN_N=inner % (up.block_n // 2) == 0, **_constants(up, gate_up), **common,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, last.block_n),)](
        h, routed.weights, plan, down.weight, down.scale, down.bias, out, *deferred_buffers(deferred),
        T, hidden, inner, slots, *down.scale_layout, BIAS=down.bias is not None, ADD=add, DEFER=deferred is not None,
        EVEN_N=hidden % last.block_n == 0, **_constants(last, down), **common,
    )  # fmt: skip
    return out


def _fit(config: StepConfig, weights: ExpertWeights) -> StepConfig:
    """The tiling, limited so that one scale applies to all columns of a piece."""
    columns = weights.scale_layout[3]
    if weights.format not in ("fp8", "int4") or config.block_k <= columns:
        return config
    return StepConfig(config.block_n, columns, config.unroll * config.block_k // columns, config.num_warps, config.stages)


def _constants(config: StepConfig, weights: ExpertWeights) -> dict[str, int | bool]:
    return dict(
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, UNROLL=config.unroll, STAGES=config.stages, FORMAT=FORMATS[weights.format],
        EVEN_K=weights.shape[2] % (config.block_k * config.unroll) == 0, num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "first"])
def _up_kernel(
    x_ptr, ids_ptr, weights_ptr, masks_ptr, w_ptr, scale_ptr, bias_ptr, h_ptr, plan_ptr,
    T, inner, K, E, first, words, expert_scales, row_scales, scale_rows, scale_columns, alpha, limit,
    BLOCK_M: tl.constexpr, TOP_K: tl.constexpr, TOP_PAD: tl.constexpr, E_PAD: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program multiplies by `BLOCK_N / 2` gate rows and the matching up rows of one selected expert."""
    pdl_sync(PDL)
    tile, slot = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    e = tl.arange(0, E_PAD)
    word = masks_ptr + m[:, None] * words + ((first + e) // 32)[None, :]
    bits = tl.load(word, mask=(m < T)[:, None] & (e < E)[None, :], other=0) >> ((first + e) % 32)[None, :]
    hit = tl.max(bits & 1, 0)
    place = tl.cumsum(hit, 0)
    count = tl.max(place, 0)
    slots = tl.num_programs(1)
    if (slot == 0) & (tile == 0):
        tl.store(plan_ptr + slots * (BLOCK_M + 1), count)
    if slot >= count:
        return
    expert = tl.sum(tl.where((hit > 0) & (place == slot + 1), e, 0), 0)

    j = tl.arange(0, TOP_PAD)[None, :]
    pair = m[:, None] * TOP_K + j
    inside = (m < T)[:, None] & (j < TOP_K)
    chosen = inside & (tl.load(ids_ptr + pair, mask=inside, other=-1) == first + expert)
    own = tl.max(tl.where(chosen, pair, -1), 1)
    weight = tl.sum(tl.where(chosen, tl.load(weights_ptr + pair, mask=inside, other=0.0), 0.0), 1)
    if tile == 0:
        tl.store(plan_ptr + slot, expert)
        tl.store(plan_ptr + slots + slot * BLOCK_M + m, own)

    OUTPUTS: tl.constexpr = BLOCK_N // 2
    r = tl.arange(0, BLOCK_N)
    row = tl.minimum(tile * OUTPUTS + r // 2, inner - 1) + r % 2 * inner
    w_rows = row_pointers(w_ptr, expert.to(tl.int64) * (2 * inner) + row[:, None], K, FORMAT)
    scales = scale_ptr
    if FORMAT != 0:
        scales = scale_ptr + expert.to(tl.int64) * expert_scales + (row // scale_rows)[:, None] * row_scales
    x_rows = x_ptr + m[:, None] * K
    x_in = (own >= 0)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(0, K, UNROLL * BLOCK_K, num_stages=STAGES):
        for piece in tl.static_range(UNROLL):
            acc = dot_step(
                acc, w_rows, scales, x_rows, x_in, start + piece * BLOCK_K, K, scale_columns, BLOCK_K, FORMAT, EVEN_K, PTX
            )  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * (2 * inner) + row).to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(acc.reshape(OUTPUTS, 2, BLOCK_M), (2, 0, 1)))
    h = apply_gate(gate, up, alpha, limit, KIND) * weight[:, None]
    column = tile * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    out_mask = x_in if EVEN_N else x_in & (column < inner)
    tl.store(h_ptr + own.to(tl.int64)[:, None] * inner + column, h.to(h_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["T", "slots"])
def _down_kernel(
    h_ptr, weights_ptr, plan_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, gain_ptr, scaled_ptr, squares_ptr,
    T, N, K, slots, expert_scales, row_scales, scale_rows, scale_columns,
    BLOCK_M: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, DEFER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes `BLOCK_N` outputs of all tokens, summed over the selected experts, one after another."""
    pdl_sync(PDL)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    count = tl.load(plan_ptr + slots * (BLOCK_M + 1))
    steps = tl.cdiv(K, UNROLL * BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The plan of a step is loaded one step ahead.
    expert = tl.load(plan_ptr, mask=count > 0, other=0).to(tl.int64)
    pair = tl.load(plan_ptr + slots + m, mask=(m < T) & (count > 0), other=-1)
    for step in tl.range(0, count * steps, num_stages=STAGES):
        start = step % steps * (UNROLL * BLOCK_K)
        w_rows = row_pointers(w_ptr, expert * N + row[:, None], K, FORMAT)
        scales = scale_ptr
        if FORMAT != 0:
            scales = scale_ptr + expert * expert_scales + (row // scale_rows)[:, None] * row_scales
        h_rows = h_ptr + tl.maximum(pair, 0)[:, None] * K
        for piece in tl.static_range(UNROLL):
            acc = dot_step(
                acc, w_rows, scales, h_rows, (pair >= 0)[:, None], start + piece * BLOCK_K, K, scale_columns, BLOCK_K, FORMAT, EVEN_K, PTX,
            )  # fmt: skip
        slot = tl.minimum((step + 1) // steps, count - 1)
        expert = tl.load(plan_ptr + slot).to(tl.int64)
        pair = tl.load(plan_ptr + slots + slot * BLOCK_M + m)
    acc = tl.trans(acc)
    if BIAS:
        for slot in range(0, count):
            expert = tl.load(plan_ptr + slot).to(tl.int64)
            pair = tl.load(plan_ptr + slots + slot * BLOCK_M + m)
            weight = tl.load(weights_ptr + tl.maximum(pair, 0), mask=pair >= 0, other=0.0)
            acc += weight[:, None] * tl.load(bias_ptr + expert * N + row).to(tl.float32)[None, :]
    out_mask = (m < T)[:, None] if EVEN_N else (m < T)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    if ADD:
        acc += tl.load(out_ptr + at, mask=out_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    if DEFER:
        gain = tl.load(gain_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + at, (acc * gain[None, :]).to(scaled_ptr.dtype.element_ty), mask=out_mask)
        kept = acc if EVEN_N else tl.where((n < N)[None, :], acc, 0.0)
        tl.store(squares_ptr + m * tl.num_programs(0) + tl.program_id(0), sum_rows(kept * kept), mask=m < T)
