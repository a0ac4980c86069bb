"""GEMMs of e4m3 by e4m3 for prompts: rows are quantized, and torch multiplies them by the stored weights."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.config.quant_config import BLOCK
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.kernels.scale_layout import scale_layout

ROWS = 16
"""Rows are padded to a multiple of this."""


def supports(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether torch can multiply by e4m3 `weight` [N, K] with these scales: one per row, or one per 128 x 128 entries."""
    (N, K), blocks = weight.shape, scale.dim() == 2
    return N % 16 == 0 and K % (4 * BLOCK if blocks else 16) == 0 and (not blocks or scale_layout(N, K, scale)[1:] == (BLOCK, BLOCK))


def quantized_gemm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """`x @ (weight * scale).T`, [M, N] in the dtype of x. x is rounded to e4m3, with a scale per 128 columns of a row, or per row.

    Raises:
        RuntimeError: this torch, or this GPU, has no such GEMM.
    """
    blocks = scale.dim() == 2
    values, row_scales = quantize_rows(x, BLOCK if blocks else None, padding=ROWS, pdl=pdl)
    by_column = scale.t() if blocks else scale[None, :]
    # The oldest supported torch has no public scaled_mm.
    return torch.ops.aten._scaled_mm(values, weight.t(), row_scales, by_column, out_dtype=x.dtype)[: len(x)]


def quantize_rows(x: torch.Tensor, group: int | None = None, *, padding: int = 1, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, K] as e4m3 and float32 scales [R, groups], whose columns are contiguous: the largest entry of each group becomes 448.

    Args:
        group: columns per scale, a power of two that divides K; all of a row by default.
        padding: R of the results is the next multiple; added rows are zeros.
    """
    R, K = x.shape
    padded, groups = -(-R // padding) * padding, 1 if group is None else K // group
    values = torch.empty((padded, K), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, padded), dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(K) if group is None else group
    _quantize_kernel[(padded,)](
        x, values, scales, R, K, padded, GROUPS=triton.next_power_of_2(groups), WIDTH=width, PDL=pdl, num_warps=4, **launch_options(pdl)
    )
    return values, scales.t()


@triton.jit(do_not_specialize=["R", "padded"])
def _quantize_kernel(x_ptr, values_ptr, scales_ptr, R, K, padded, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """One program: one row."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    k = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + row * K + k, mask=(k < K) & (row < R), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / 448.0
    value = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    tl.store(values_ptr + row * K + k, value.to(values_ptr.dtype.element_ty), mask=k < K)
    tl.store(scales_ptr + group.to(tl.int64) * padded + row, scale, mask=group * WIDTH < K)
