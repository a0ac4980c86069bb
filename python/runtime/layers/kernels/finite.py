"""Replaces NaN and infinity in the KV cache."""

# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(x):
    """`x` with zeros for NaN and infinity, because 0 * NaN is NaN: masked keys of a freed page could otherwise spoil another request's
    output.
    """
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, tl.zeros_like(x))
