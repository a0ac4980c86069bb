"""The reduction that every argmax kernel shares: the largest float of a row and its first column.

The order is that of `torch.argmax`: the first of equal entries, both zeros equal, every NaN equal and above infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_COLUMN = tl.constexpr(0x7FFFFFFF)
"""A column beyond all others."""
LEAST_KEY = tl.constexpr(-0x7FFFFFFF - 1)
"""A key below those of all floats."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_argmax(x, column):
    """For each row of float32 x [rows, columns]: an int32 key with the order of the largest entry, and its first column.

    `column` int32, of a shape that broadcasts to x's. Entries of x outside the row are minus infinity, with columns beyond the row.
    """
    largest = tl.reduce(x, 1, _larger)
    # x may be a whole GEMM tile, so there are few operations per entry, and the key is computed only from the maximum.
    top = largest[:, None]
    first = tl.min(tl.where((x == top) | (x != x), column, NO_COLUMN), 1)
    return order_key(largest), first


@triton.jit
def order_key(x):
    """int32 keys with the order of float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, 0x7FFFFFFF, key)
