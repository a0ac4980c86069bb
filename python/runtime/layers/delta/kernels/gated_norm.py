"""The norm of each head's output, times SiLU of its gate, as a Triton kernel."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.norm import RMSNorm


def gated_norm(x: torch.Tensor, gate: torch.Tensor, norm: RMSNorm, pdl: bool) -> torch.Tensor:
    """See `BlockOps.gated_norm`. `x` is contiguous, and `gate` has any row stride."""
    dim, out = len(norm.weight), torch.empty_like(x)
    _gated_norm[(len(x), x.shape[1] // dim)](
        x, gate, gate.stride(0), norm.weight, out, x.shape[1], dim, norm.eps, BLOCK=triton.next_power_of_2(dim), PDL=pdl, num_warps=1,
        **launch_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm(x, gate, gate_stride, weight, out, columns, dim, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: one head of one token."""
    entry = tl.arange(0, BLOCK)
    inside = entry < dim
    gain = tl.load(weight + entry, mask=inside, other=0.0).to(tl.float32)
    pdl_sync(PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * dim + entry
    value = tl.load(x + token * columns + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    value *= (1.0 / tl.sqrt(tl.sum(value * value, 0) / dim + eps)) * gain
    tl.store(out + token * columns + column, (value * z / (1.0 + tl.exp(-z))).to(out.dtype.element_ty), mask=inside)
