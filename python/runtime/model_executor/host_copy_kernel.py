"""Copies a few numbers to pinned host memory in one Triton kernel."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256
"""Numbers that one program copies."""


@triton.jit(do_not_specialize=["count"])
def _copy(source, target, count, BLOCK: tl.constexpr):
    """One program: `BLOCK` numbers. Launched without PDL, so the previous kernel has ended."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def copy_to_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a contiguous CUDA tensor to a pinned tensor of the same shape and dtype. The host may read it once the kernel has ended."""
    assert source.is_contiguous()
    assert target.is_pinned()
    _copy[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), BLOCK=BLOCK)
