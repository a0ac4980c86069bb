"""Replaces NaN and infinity in the KV cache."""

# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(x):
    """`x` with zeros for NaN and infinity, which attention could carry from a freed page into another request's text: 0 x NaN is NaN."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, tl.zeros_like(x))
