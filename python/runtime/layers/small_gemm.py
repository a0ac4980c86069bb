"""Matrix products of few rows: one Triton kernel that reads each weight once, with what surrounds the product folded in."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 64
"""Above this, arithmetic and not weights sets the time: cuBLAS."""
PREFETCH_COLUMNS = 1024
"""Columns of each weight row asked into L2 while the kernel before still runs."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How the product is cut: tiles of `block_n` weight rows by `block_k` columns, `stages` of them in flight."""

    block_n: int
    block_k: int
    num_warps: int
    stages: int


def padded_rows(rows: int) -> int:
    """The rows that the kernel computes for `rows` of input: 16, 32 or 64."""
    return max(triton.next_power_of_2(rows), 16)


def small_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: GemmConfig,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    add: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """`out = epilogue(prologue(x) @ weight.T + bias)`.

    Args:
        x: [M, K] contiguous, M <= 64, K a multiple of 16: the weight's dtype, or with `norm` the float32 residual stream.
        weight: [N, K] contiguous, bfloat16 or float16.
        out: written: [M, N], or [M, N / 2] with `silu`; any float dtype.
        config: how to cut it.
        bias: [N].
        norm: [K], weight of an RMS norm of x with `eps`. Bfloat16 only: the product is taken of x * norm, rounded, and divided by the
            root mean square at the end, which rounds as the norm's own output would but needs the stream's range.
        silu: weight holds gate rows, then up rows; out is silu(gate) * up.
        add: add the product to what `out` holds.
        pdl: start before the kernel ahead has ended, prefetch weights and wait (programmatic dependent launch, Hopper).

    Each row of `out` depends on its own row of x only, summed in an order that N, K and `config` fix.
    """
    (M, K), N = x.shape, out.shape[1]
    assert M <= MAX_ROWS and K % 16 == 0, f"small_gemm takes up to {MAX_ROWS} rows of a multiple of 16 columns, not {M} x {K}"  # noqa: PT018
    assert norm is None or weight.dtype != torch.float16, "a folded norm needs more range than float16 has"
    launch = {"launch_pdl": True} if pdl else {}
    _small_gemm_kernel[(triton.cdiv(N, config.block_n),)](
        x, weight, out, bias, norm, M, N, K, eps,
        BLOCK_M=padded_rows(M), BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN_N=N % config.block_n == 0,
        EVEN_K=K % config.block_k == 0, BIAS=bias is not None, NORM=norm is not None, SILU=silu, ADD=add, PDL=pdl,
        PREFETCH=PREFETCH_COLUMNS, num_warps=config.num_warps, num_stages=config.stages, **launch,
    )  # fmt: skip
    return out


@triton.jit
def start_early(PDL: tl.constexpr):
    """Let the next kernel start as soon as it finds room, and wait for the one before: after this, its results may be read.

    Sound along a stream because every kernel waits before it reads or writes anything but weights: when one has ended, all before it have.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _prefetch(rows_ptr, K, COLUMNS: tl.constexpr):
    """Ask the first columns of some weight rows (16-bit) into L2, 128 bytes at a time."""
    column = tl.arange(0, COLUMNS // 64) * 64
    lines = rows_ptr[:, None] + tl.minimum(column, K - 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def _small_gemm_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, norm_ptr, M, N, K, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One program: all rows of x against `BLOCK_N` weight rows (with SILU, as many gate rows and the up rows beside them)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < N
    n_row = n if EVEN_N else tl.minimum(n, N - 1)
    w_rows = w_ptr + n_row.to(tl.int64) * K
    up_rows = w_rows + N.to(tl.int64) * K
    if PDL:
        _prefetch(w_rows, K, PREFETCH)
        if SILU:
            _prefetch(up_rows, K, PREFETCH)
    start_early(PDL)

    m = tl.arange(0, BLOCK_M)
    m_in = m < M
    x_rows = x_ptr + m * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_in = k < K
        x_mask = m_in[:, None] if EVEN_K else m_in[:, None] & k_in[None, :]
        x = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0.0, eviction_policy="evict_last")
        if NORM:
            gain = tl.load(norm_ptr + k, mask=k_in, other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
            x = (x * gain[None, :]).to(w_ptr.dtype.element_ty)
        if EVEN_K:
            w = tl.load(w_rows[:, None] + k[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(w_rows[:, None] + k[None, :], mask=k_in[None, :], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, tl.trans(w), acc)
        if SILU:
            if EVEN_K:
                w_up = tl.load(up_rows[:, None] + k[None, :], eviction_policy="evict_first")
            else:
                w_up = tl.load(up_rows[:, None] + k[None, :], mask=k_in[None, :], other=0.0, eviction_policy="evict_first")
            up = tl.dot(x, tl.trans(w_up), up)

    if NORM:
        scale = 1.0 / tl.sqrt(squares / K + eps)
        acc *= scale[:, None]
        up *= scale[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n_row).to(tl.float32)[None, :]
        if SILU:
            up += tl.load(bias_ptr + N + n_row).to(tl.float32)[None, :]
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    out_at = out_ptr + m[:, None] * N + n[None, :]
    out_mask = m_in[:, None] if EVEN_N else m_in[:, None] & n_in[None, :]
    if ADD:
        acc += tl.load(out_at, mask=out_mask, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
