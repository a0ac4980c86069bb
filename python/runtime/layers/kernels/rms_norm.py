"""RMS norm of the residual stream as one Triton kernel."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.norm import RMSNorm

WIDE = 2048
"""From this many columns on, a row is processed by eight warps."""


def rms_norm_rows(h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype, pdl: bool) -> torch.Tensor:
    """Norm float32 rows [T, hidden], contiguous, into `dtype`; `pdl` as in `triton_gemm`."""
    out = torch.empty(h.shape, dtype=dtype, device=h.device)
    T, hidden = h.shape
    _norm_kernel[(T,)](
        h, norm.weight, out, hidden, norm.eps, BLOCK=triton.next_power_of_2(hidden), PDL=pdl, num_warps=8 if hidden >= WIDE else 4,
        **launch_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(h_ptr, weight_ptr, out_ptr, hidden, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program processes one row."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    gain = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    pdl_sync(PDL)
    at = tl.program_id(0).to(tl.int64) * hidden + column
    x = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(out_ptr + at, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=inside)
