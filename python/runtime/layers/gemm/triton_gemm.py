"""Skinny GEMMs in Triton: one kernel that reads each weight once, with the epilogue fused."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.config.kernel_configs import TritonConfig
from runtime.layers.gemm.deferred_norm import deferred_buffers
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.kernels.argmax_reduce import tile_argmax
from runtime.layers.kernels.pdl import launch_options
from runtime.layers.kernels.scale_layout import scale_layout
from runtime.layers.kernels.weight_step import DENSE, FP8, INT4, dot_step, row_pointers

MAX_ROWS = 128
"""Maximum rows: a larger GEMM is compute-bound, so cuBLAS is used."""
CHUNK = tl.constexpr(512)
"""Columns of a weight row that one instruction prefetches into L2."""
SQUARES = tl.constexpr(16)
"""Partial sums of squares per row during the main loop: a fixed number, so that the order of summation is fixed."""
SQUARES_IN_FLIGHT = 64
"""Sums of squares that a thread loads before it waits for the loads."""


def padded_rows(rows: int, swap: bool = False) -> int:
    """Rows that the kernel computes for `rows` of input: a power of two of at least 16, or 8 with `swap`."""
    return max(triton.next_power_of_2(rows), 8 if swap else 16)


def triton_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    config: TritonConfig,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    weight_scale: torch.Tensor | None = None,
    pdl: bool = False,
    launch: bool = True,
) -> torch.Tensor | None:
    """`out = epilogue(x @ weight.T)`; returns `out`.

    Args:
        x: [M, K] contiguous, M <= 128, K a multiple of 16, bfloat16, float16, or e4m3 if the weight is e4m3 without scales.
        weight: [N, K] contiguous, the dtype of x, or e4m3 with scales, which is converted in registers; or uint8 [N, K / 2], int4
            (`quantization.int4`).
        out: [M, `epilogue.columns(N)`] contiguous, any float dtype; None if only the argmax is needed.
        config: the tiling; with `swap` and without `tma` for a weight with scales.
        epilogue: operations on the sums; a deferred norm has `config.parts(N)` sums of squares per row, an argmax that many tiles.
        weight_scale: for e4m3 float32 [N], one per row, or one per block; for int4 float16 [N, groups, 2], as in `scale_layout`.
        pdl: start before the previous kernel has ended, prefetch weights, then wait (programmatic dependent launch, Hopper).
        launch: False only compiles; tensors may be mock tensors.

    Each row of `out` depends only on its own row of x, summed in an order fixed by N, K and `config`.
    """
    (M, K), N = x.shape, epilogue.columns(weight.shape[0])
    form = DENSE if weight_scale is None else INT4 if weight.dtype is torch.uint8 else FP8
    assert M <= MAX_ROWS and K % 16 == 0, f"expected at most {MAX_ROWS} rows and a multiple of 16 columns; got {M} x {K}"  # noqa: PT018
    epilogue.check(out, M, weight.shape[0], config.parts(weight.shape[0]))
    outputs = config.block_n // 2 if epilogue.gated else config.block_n
    assert weight_scale is None or (config.swap and not config.tma), f"quantised weights need a tiling with swap, without tma; got {config}"
    scales = (0, 1, K) if weight_scale is None else scale_layout(weight.shape[0], K, weight_scale)
    row_squares, count, eps = _row_scale(epilogue)
    args = (
        x, _tiles(weight, config, epilogue.gated), weight, weight_scale, out, epilogue.argmax, epilogue.bias, row_squares,
        *deferred_buffers(epilogue.deferred), M, N, K, *scales, count, eps, config.prefetch, int(config.late),
    )  # fmt: skip
    options = dict(
        EVEN_N=N % outputs == 0, EVEN_K=K % config.block_k == 0, STORE=out is not None, PDL=pdl,
        FORMAT=form.value, PIECE=min(config.block_k, scales[2]), PTX=form is FP8 and x.is_cuda and x.dtype is torch.bfloat16,
        **_constants(config, padded_rows(M, config.swap), count), **_operations(epilogue), **launch_options(pdl),
    )  # fmt: skip
    grid = (triton.cdiv(N, outputs),)
    start = _triton_gemm_kernel[grid] if launch else partial(_triton_gemm_kernel.warmup, grid=grid)  # pyright: ignore[reportFunctionMemberAccess]
    start(*args, **options)
    return out


def _tiles(weight: torch.Tensor, config: TritonConfig, gated: bool) -> torch.Tensor | TensorDescriptor:
    """The weight; with `tma`, a descriptor of tiles of gate rows and the matching up rows."""
    (rows, K), block_n, block_k = weight.shape, config.block_n, config.block_k
    if not config.tma:
        return weight
    if gated:
        return TensorDescriptor(weight, [2, rows // 2, K], [rows // 2 * K, K, 1], [2, block_n // 2, block_k])
    return TensorDescriptor(weight, [rows, K], [K, 1], [block_n, block_k])


def _row_scale(epilogue: Epilogue) -> tuple[torch.Tensor | None, int, float]:
    """Sums of squares by row, their number per row, and epsilon."""
    scale = epilogue.scale
    return (None, 1, 0.0) if scale is None else (scale.squares, scale.squares.shape[1], float(scale.eps))


def _constants(config: TritonConfig, block_m: int, squares: int) -> dict[str, int | bool]:
    """The compile-time constants of a tiling, for rows with `squares` sums of squares."""
    parts, fit = triton.next_power_of_2(squares), max(SQUARES_IN_FLIGHT * 32 * config.num_warps // block_m, SQUARES.value)
    return dict(
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SWAP=config.swap, TMA=config.tma, STAGES=config.stages,
        PARTS=parts, PARTS_PER_LOOP=min(parts, fit), num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip


def _operations(epilogue: Epilogue) -> dict[str, bool]:
    """The compile-time constants of the epilogue."""
    return dict(
        BIAS=epilogue.bias is not None, GATED=epilogue.gated, GELU=epilogue.gelu, ADD=epilogue.add, ARGMAX=epilogue.argmax is not None,
        SCALE=epilogue.scale is not None, DEFER=epilogue.deferred is not None,
    )  # fmt: skip


@triton.jit
def prefetch_rows(rows_ptr, K, columns):
    """Prefetch approximately the first `columns` of some rows of K values into L2. Source: PTX ISA, cp.async.bulk.prefetch."""
    SIZE: tl.constexpr = rows_ptr.dtype.element_ty.primitive_bitwidth // 8
    width = tl.minimum(K, CHUNK)
    for start in range(0, tl.minimum(columns, K), CHUNK):
        at = rows_ptr + tl.minimum(start, K - width)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at.to(tl.int64), width * SIZE], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_squares(squares_ptr, m, M, parts, PARTS: tl.constexpr, PARTS_PER_LOOP: tl.constexpr):
    """Load sums of squares [M, parts] and add each row's to at most `SQUARES` partial sums.

    The order depends only on `parts`: `PARTS` is the next power of two, `PARTS_PER_LOOP` a power of two.
    """
    BLOCK: tl.constexpr = min(PARTS, SQUARES)
    part = tl.arange(0, BLOCK)
    at = squares_ptr + m[:, None] * parts + part[None, :]
    sums = tl.zeros((m.shape[0], BLOCK), dtype=tl.float32)
    for outer in range(0, PARTS, PARTS_PER_LOOP):
        for block in tl.static_range(0, PARTS_PER_LOOP, BLOCK):
            start = outer + block
            sums += tl.load(at + start, mask=(m < M)[:, None] & (part < parts - start)[None, :], other=0.0)
    return sums


@triton.jit
def sum_rows(x):
    """Sum each row of x [rows, a power of two up to 256] by halving, so that the order does not depend on how threads share the row."""
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(x.reshape(x.shape[0], 2, x.shape[1] // 2), 1)
    return x.reshape(x.shape[0])


@triton.jit(do_not_specialize=["M", "parts", "prefetch", "late"])
def _triton_gemm_kernel(
    x_ptr, tiles, w_ptr, w_scale_ptr, out_ptr, partial_ptr, bias_ptr, row_squares_ptr, gain_ptr, scaled_ptr, squares_ptr,
    M, N, K, row_scales, scale_rows, scale_columns, parts, eps, prefetch, late,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, ARGMAX: tl.constexpr, STORE: tl.constexpr,
    SCALE: tl.constexpr, PARTS: tl.constexpr, PARTS_PER_LOOP: tl.constexpr, DEFER: tl.constexpr,
    PDL: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, FORMAT: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """One program multiplies all rows of x by `BLOCK_N` weight rows (with GATED, gate rows and the matching up rows)."""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * OUTPUTS
    r = tl.arange(0, BLOCK_N)
    if GATED:
        # A tile loaded by descriptor has its gate rows before its up rows; otherwise they alternate.
        n = first + (r % OUTPUTS if TMA else r // 2)
        row = tl.minimum(n, N - 1) + (r // OUTPUTS if TMA else r % 2) * N
    else:
        row = tl.minimum(first + r, N - 1)
    w_rows = row_pointers(w_ptr, row.to(tl.int64), K, FORMAT)
    if PDL:
        if FORMAT == INT4:
            prefetch_rows(w_rows, K // 2, prefetch // 2)
        else:
            prefetch_rows(w_rows, K, prefetch)
        if late == 0:
            gdc_launch_dependents()
        gdc_wait()

    m = tl.arange(0, BLOCK_M)
    m_in = m < M
    column = first + tl.arange(0, OUTPUTS)
    out_at = m[:, None] * N + column[None, :]
    out_mask = m_in[:, None] if EVEN_N else m_in[:, None] & (column < N)[None, :]
    # Loaded before the loop although needed after it, so that the loads overlap the loop.
    sums = load_squares(row_squares_ptr, m, M, parts, PARTS, PARTS_PER_LOOP) if SCALE else None
    before = tl.load(out_ptr + out_at, mask=out_mask, other=0.0).to(tl.float32) if ADD else None
    gain = tl.load(gain_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :] if DEFER else None
    x_rows = x_ptr + m * K
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    if FORMAT != 0:
        scales = w_scale_ptr + (row // scale_rows)[:, None] * row_scales
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            for piece in tl.static_range(0, BLOCK_K, PIECE):
                acc = dot_step(
                    acc, w_rows[:, None], scales, x_rows[:, None], m_in[:, None], start + piece, K, scale_columns, PIECE, FORMAT, EVEN_K,
                    PTX,
                )  # fmt: skip
    else:
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x_mask = m_in[:, None] if EVEN_K else m_in[:, None] & (k < K)[None, :]
            x = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0.0, eviction_policy="evict_last")
            if TMA and GATED:
                w = tiles.load([0, first, start]).reshape(BLOCK_N, BLOCK_K)
            elif TMA:
                w = tiles.load([first, start])
            elif EVEN_K:
                w = tl.load(w_rows[:, None] + k[None, :], eviction_policy="evict_first")
            else:
                w = tl.load(w_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            acc = tl.dot(w, tl.trans(x), acc) if SWAP else tl.dot(x, tl.trans(w), acc)
    if PDL:  # noqa: SIM102 - the outer condition is known when compiling, the inner is not
        if late != 0:
            gdc_launch_dependents()

    if SWAP:
        acc = tl.trans(acc)
    if SCALE:
        acc *= (1.0 / tl.sqrt(sum_rows(sums) / K + eps))[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if GATED:
        if TMA:
            gate, up = tl.split(tl.permute(acc.reshape(BLOCK_M, 2, OUTPUTS), (0, 2, 1)))
        else:
            gate, up = tl.split(acc.reshape(BLOCK_M, OUTPUTS, 2))
        # gelu in its tanh form is gate * sigmoid(sqrt(8 / pi) * (gate + 0.044715 gate ** 3))
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
        acc = gate / (1.0 + tl.exp(-slope)) * up
    if ARGMAX:
        if not EVEN_N:  # columns beyond the last are not stored
            acc = tl.where((column < N)[None, :], acc, float("-inf"))
        key, at = tile_argmax(acc, column[None, :])
        partial_at = partial_ptr + m * tl.num_programs(0) + tl.program_id(0)
        tl.store(partial_at, key, mask=m_in)
        tl.store(partial_at + M * tl.num_programs(0), at, mask=m_in)
    if STORE:
        if ADD:
            acc += before
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        if DEFER:
            tl.store(scaled_ptr + out_at, (acc * gain).to(scaled_ptr.dtype.element_ty), mask=out_mask)
            inside = acc if EVEN_N else tl.where((column < N)[None, :], acc, 0.0)
            tl.store(squares_ptr + m * tl.num_programs(0) + tl.program_id(0), sum_rows(inside * inside), mask=m_in)
