"""The embedding of tokens, the start of the residual stream and the norm that reads it first, as one Triton kernel."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_wait_first
from runtime.layers.kernels.rms_norm import WIDE
from runtime.layers.norm import RMSNorm


def embed_rows(
    ids: torch.Tensor, table: torch.Tensor, scale: float, norm: RMSNorm | None, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`table[ids] * scale` in float32, and its norm.

    Args:
        ids: int64 [T], each in 0..V-1, contiguous, of any alignment.
        table: [V, hidden] contiguous, 16 bits.
        norm: the norm to compute too, if given.
        pdl: as in `triton_gemm`, except that the kernel waits before it triggers the next launch. Later kernels may therefore read data
            that was written before this kernel, such as positions, slots and lengths, before their own wait.

    Returns:
        float32 [T, hidden], and its `norm` in the dtype of the norm's weight, or None.
    """
    T, hidden = len(ids), table.shape[1]
    h = torch.empty((T, hidden), dtype=torch.float32, device=table.device)
    normed = None if norm is None else torch.empty((T, hidden), dtype=norm.weight.dtype, device=table.device)
    _embed_kernel[(T,)](
        ids, table, None if norm is None else norm.weight, h, normed, hidden, scale, 0.0 if norm is None else norm.eps,
        BLOCK=triton.next_power_of_2(hidden), SCALED=scale != 1.0, NORM=norm is not None, PDL=pdl, num_warps=8 if hidden >= WIDE else 4,
        **launch_options(pdl),
    )  # fmt: skip
    return h, normed


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _embed_kernel(
    ids_ptr, table_ptr, gain_ptr, h_ptr, normed_ptr, hidden, scale, eps,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program processes one token."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32) if NORM else 1.0
    pdl_wait_first(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.load(table_ptr + tl.load(ids_ptr + t) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        h *= scale
    at = t * hidden + column
    tl.store(h_ptr + at, h, mask=inside)
    if NORM:
        norm_scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / hidden + eps)
        tl.store(normed_ptr + at, (h * norm_scale * gain).to(normed_ptr.dtype.element_ty), mask=inside)
