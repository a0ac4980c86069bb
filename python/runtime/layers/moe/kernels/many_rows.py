"""Experts for many tokens, as in prompts: two grouped GEMMs over the pairs sorted by expert, then each token's weighted sum."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runtime.config.kernel_configs import GroupedConfig
from runtime.layers.gemm.quantized_rows import quantize_rows
from runtime.layers.kernels.fragments import FORMATS
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.kernels.rms_norm import WIDE
from runtime.layers.kernels.weight_step import dot_step, row_pointers
from runtime.layers.moe.kernels.align import Aligned, align
from runtime.layers.moe.kernels.expert_pass import ExpertPass
from runtime.layers.moe.kernels.gate import apply_gate
from runtime.layers.moe.router import Routing
from runtime.layers.norm import RMSNorm

SUM_COLUMNS = 1024


def experts_many_rows(experts: ExpertPass, config: GroupedConfig, added: Added | None = None) -> torch.Tensor:
    """Like `experts_in_triton`, for any number of tokens; outputs of experts are rounded to the dtype of x before they are summed.

    Args:
        config: the tilings; with `config.fp8_rows` and FP8 weights, activations are rounded to e4m3 with one scale per row.
        added: as in `sum_pairs`.
    """
    x, gate_up, _, routed, _, out, first, pdl, *_ = experts
    (T, hidden), (E, N, _), top_k = x.shape, gate_up.shape, routed.ids.shape[1]
    inner, pairs = N // 2, T * top_k
    experts.check()
    aligned = align(routed.ids, first, E, config.rows, pdl=pdl)
    h = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    y = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    x_scale = h_scale = None
    fp8_rows = config.fp8_rows and gate_up.format == "fp8"
    if fp8_rows:
        x, x_scale = quantize_rows(x, pdl=pdl)
    _grouped(experts, config, aligned, x, x_scale, h, gated=True)
    if fp8_rows:
        h, h_scale = quantize_rows(h, pdl=pdl)
    _grouped(experts, config, aligned, h, h_scale, y, gated=False)
    return sum_pairs(y, routed, out, first, E, added=added, pdl=pdl)


@dataclass(slots=True)
class Added:
    """Adds sums to the residual stream, optionally with an addend and the next norm.

    Attributes:
        addend: [T, hidden] in the activations' dtype, added too; or None.
        norm: the norm that reads the stream next, or None.
        normed: `norm` of the stream, [T, hidden] in the activations' dtype, if a kernel has computed it; not all kernels do.
    """

    addend: torch.Tensor | None = None
    norm: RMSNorm | None = None
    normed: torch.Tensor | None = None


def sum_pairs(
    y: torch.Tensor, routed: Routing, out: torch.Tensor, first: int, experts: int, *, added: Added | None, pdl: bool
) -> torch.Tensor:
    """`out[t] = sum(y[pair])` over the pairs of each token with experts in this process, in order; returns `out`.

    Args:
        y: [T * k, hidden], each row times the weight of its pair.
        added: if given, `out` is the float32 stream: `out[t] += sum(y[pair]) + addend[t]`, followed by the norm. None: `out` is
            overwritten.
    """
    (T, hidden), top_k = out.shape, routed.ids.shape[1]
    addend, norm, normed = (None, None, None) if added is None else (added.addend, added.norm, None)
    columns = SUM_COLUMNS if norm is None else triton.next_power_of_2(hidden)
    if added is not None and norm is not None:
        added.normed = normed = torch.empty_like(out, dtype=norm.weight.dtype)
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _sum_kernel[(T, triton.cdiv(hidden, columns))](
        y, routed.ids, out, addend, gain, normed, hidden, first, experts, eps,
        TOP_K=top_k, BLOCK=columns, ADD=added is not None, ADDEND=addend is not None, NORM=norm is not None, PDL=pdl,
        num_warps=8 if columns >= WIDE else 4, **launch_options(pdl),
    )  # fmt: skip
    return out


def _grouped(
    experts: ExpertPass, config: GroupedConfig, aligned: Aligned, x: torch.Tensor, x_scale: torch.Tensor | None, out: torch.Tensor,
    *, gated: bool,
) -> None:  # fmt: skip
    """Launch one grouped GEMM of a pass. With `gated`, x has a row per token and `out` is gated; otherwise both have a row per pair."""
    weights, act, routed, pdl = experts.gate_up if gated else experts.down, experts.act, experts.routed, experts.pdl
    (_, N, K), columns = weights.shape, out.shape[1]
    outputs = config.block_n // 2 if gated else config.block_n
    block_k = config.block_k
    if weights.format in ("fp8", "int4"):  # one scale applies to all columns of a step
        block_k = min(block_k, weights.scale_layout[3])
    _grouped_kernel[(aligned.tiles * triton.cdiv(columns, outputs),)](
        x, x_scale, weights.weight, weights.scale, weights.bias, out, routed.weights, aligned.pairs, aligned.experts, aligned.used,
        routed.weights.numel(), columns, N, K, *weights.scale_layout, act.alpha, act.limit, TOP_K=routed.ids.shape[1], GATED=gated,
        KIND=act.kind, BIAS=weights.bias is not None, FP8_ROWS=x_scale is not None, BLOCK_M=config.rows, BLOCK_N=config.block_n,
        BLOCK_K=block_k, TILES_TOGETHER=config.tiles_together, STAGES=config.stages, FORMAT=FORMATS[weights.format],
        EVEN_N=columns % outputs == 0, EVEN_K=K % block_k == 0, PTX=out.is_cuda and out.dtype is torch.bfloat16, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.stages, **launch_options(pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _grouped_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, weights_ptr, pairs_ptr, experts_ptr, used_ptr,
    pairs, columns, N, K, expert_scales, row_scales, scale_rows, scale_columns, alpha, limit,
    TOP_K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, FP8_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES_TOGETHER: tl.constexpr, STAGES: tl.constexpr,
    FORMAT: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program multiplies one tile of pairs by `BLOCK_N` rows of its expert's weights, which are the left operand."""
    pdl_sync(PDL)
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    # Neighbouring programs use the same weights for `TILES_TOGETHER` tiles of pairs.
    wide = tl.cdiv(columns, OUTPUTS)
    used = tl.load(used_ptr)
    group = tl.program_id(0) // (TILES_TOGETHER * wide)
    begin = group * TILES_TOGETHER
    together = tl.minimum(used - begin, TILES_TOGETHER)
    if together <= 0:
        return
    inside = tl.program_id(0) % (TILES_TOGETHER * wide)
    tile, block = begin + inside % together, inside // together
    if block >= wide:
        return
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(pairs_ptr + tile * BLOCK_M + m)
    r = tl.arange(0, BLOCK_N)
    if GATED:
        row = tl.minimum(block * OUTPUTS + r // 2, columns - 1) + r % 2 * columns  # gate and up rows alternate
        source = pair // TOP_K
    else:
        row = tl.minimum(block * OUTPUTS + r, columns - 1)
        source = pair
    x_in = (pair < pairs)[:, None]
    w_rows = row_pointers(w_ptr, expert * N + row[:, None], K, FORMAT)
    scales = scale_ptr
    if FORMAT != 0:
        scales = scale_ptr + expert * expert_scales + (row // scale_rows)[:, None] * row_scales
    source = tl.where(pair < pairs, source, 0).to(tl.int64)
    x_rows = x_ptr + source[:, None] * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    scale = tl.load(scales) if FP8_ROWS else None
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if FP8_ROWS:
            k = start + tl.arange(0, BLOCK_K)[None, :]
            x = tl.load(x_rows + k, mask=x_in if EVEN_K else x_in & (k < K), other=0.0)
            w = tl.load(w_rows + k, mask=None if EVEN_K else k < K, other=None if EVEN_K else 0.0)
            # Load the next scale during the multiplication, so that no step waits for its scale.
            following = tl.load(scales + tl.minimum(start + BLOCK_K, K - 1) // scale_columns)
            acc += tl.dot(w, tl.trans(x)) * scale
            scale = following
        else:
            acc = dot_step(acc, w_rows, scales, x_rows, x_in, start, K, scale_columns, BLOCK_K, FORMAT, EVEN_K, PTX)
    if FP8_ROWS:
        acc *= tl.load(x_scale_ptr + source)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + row).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(acc.reshape(OUTPUTS, 2, BLOCK_M), (2, 0, 1)))
        acc = apply_gate(gate, up, alpha, limit, KIND)
    else:
        acc = tl.trans(acc) * tl.load(weights_ptr + pair, mask=pair < pairs, other=0.0)[:, None]
    column = block * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    out_mask = x_in if EVEN_N else x_in & (column < columns)
    tl.store(out_ptr + pair.to(tl.int64)[:, None] * columns + column, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["first"])
def _sum_kernel(
    y_ptr, ids_ptr, out_ptr, addend_ptr, gain_ptr, normed_ptr, N, first, experts, eps,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, ADDEND: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program sums `BLOCK` columns of a token's pairs, or all columns if a norm follows, in order and without experts of other
    ranks.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = n < N, token * N + n
    gain = 0.0
    if NORM:
        gain = tl.load(gain_ptr + n, mask=inside, other=0.0).to(tl.float32)
    pdl_sync(PDL)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        own = tl.load(ids_ptr + token * TOP_K + j) - first
        held = (own >= 0) & (own < experts)
        acc += tl.load(y_ptr + (token * TOP_K + j) * N + n, mask=inside & held, other=0.0).to(tl.float32)
    if ADDEND:
        acc += tl.load(addend_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        acc += tl.load(out_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(acc * acc, 0) / N + eps)
        tl.store(normed_ptr + at, (acc * scale * gain).to(normed_ptr.dtype.element_ty), mask=inside)
