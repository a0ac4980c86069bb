"""RMS norm of the residual stream as one Triton kernel."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.gemm.triton_gemm import start_early

WIDE = 2048
"""From this many columns on, eight warps a row."""


def rms_norm_rows(h: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, pdl: bool) -> torch.Tensor:
    """Norm float32 rows [T, hidden], contiguous, into `dtype`; `pdl` as in `small_gemm`."""
    out = torch.empty(h.shape, dtype=dtype, device=h.device)
    launch = {"launch_pdl": True} if pdl else {}
    T, hidden = h.shape
    _norm_kernel[(T,)](
        h, weight, out, hidden, eps, BLOCK=triton.next_power_of_2(hidden), PDL=pdl, num_warps=8 if hidden >= WIDE else 4, **launch
    )
    return out


@triton.jit
def _norm_kernel(h_ptr, weight_ptr, out_ptr, hidden, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: one row."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    gain = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    start_early(PDL)
    at = tl.program_id(0).to(tl.int64) * hidden + column
    x = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(out_ptr + at, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=inside)
