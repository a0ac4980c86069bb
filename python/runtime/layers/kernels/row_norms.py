"""Norms of whole query and key rows: one exchange kernel for few rows of several ranks, else two Triton kernels.

Ranks all-reduce the squares between the two.
"""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.row_norms import RowNorms


def norm_rows(qkv: torch.Tensor, norms: RowNorms, *, pdl: bool = False) -> torch.Tensor:
    """`norms(qkv)`, in the same storage: contiguous rows [T, columns] in 16 bits or float32.

    `pdl` as in `triton_gemm`; an all-reduce does not trigger launches early.
    """
    T, columns = qkv.shape
    q_own, k_own, fused = len(norms.q_weight), len(norms.k_weight), norms.group.fused
    if fused is not None and fused.norm_rows(qkv, (norms.q_weight, norms.k_weight), norms.columns, norms.eps):
        return qkv
    squares = torch.empty((T, 2), dtype=torch.float32, device=qkv.device)
    early = pdl and norms.group.size == 1
    sizes = dict(Q_BLOCK=triton.next_power_of_2(q_own), K_BLOCK=triton.next_power_of_2(k_own))
    _squares_kernel[(T,)](
        qkv, squares, columns, q_own, k_own, *norms.columns, **sizes, PDL=early, num_warps=4,
        **launch_options(early),
    )  # fmt: skip
    _scale_kernel[(T,)](
        qkv, norms.group.all_reduce(squares), norms.q_weight, norms.k_weight, columns, q_own, k_own, norms.eps, **sizes, PDL=early,
        num_warps=4, **launch_options(early),
    )  # fmt: skip
    return qkv


@triton.jit
def _squares_kernel(
    qkv_ptr, squares_ptr, columns, q_own, k_own, q_width, k_width, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program computes one row's part of both mean squares."""
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    q, k = tl.arange(0, Q_BLOCK), tl.arange(0, K_BLOCK)
    x = tl.load(qkv_ptr + token * columns + q, mask=q < q_own, other=0.0).to(tl.float32)
    y = tl.load(qkv_ptr + token * columns + q_own + k, mask=k < k_own, other=0.0).to(tl.float32)
    tl.store(squares_ptr + token * 2, tl.sum(x * x, 0) / q_width)
    tl.store(squares_ptr + token * 2 + 1, tl.sum(y * y, 0) / k_width)


@triton.jit
def _scale_kernel(
    qkv_ptr, squares_ptr, q_weight_ptr, k_weight_ptr, columns, q_own, k_own, eps, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program scales one row by the mean squares of all ranks."""
    q, k = tl.arange(0, Q_BLOCK), tl.arange(0, K_BLOCK)
    q_gain = tl.load(q_weight_ptr + q, mask=q < q_own, other=0.0).to(tl.float32)
    k_gain = tl.load(k_weight_ptr + k, mask=k < k_own, other=0.0).to(tl.float32)
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    x_ptr, y_ptr = qkv_ptr + token * columns + q, qkv_ptr + token * columns + q_own + k
    x_scale = 1.0 / tl.sqrt(tl.load(squares_ptr + token * 2) + eps)
    y_scale = 1.0 / tl.sqrt(tl.load(squares_ptr + token * 2 + 1) + eps)
    x = tl.load(x_ptr, mask=q < q_own, other=0.0).to(tl.float32) * x_scale * q_gain
    y = tl.load(y_ptr, mask=k < k_own, other=0.0).to(tl.float32) * y_scale * k_gain
    tl.store(x_ptr, x.to(qkv_ptr.dtype.element_ty), mask=q < q_own)
    tl.store(y_ptr, y.to(qkv_ptr.dtype.element_ty), mask=k < k_own)
