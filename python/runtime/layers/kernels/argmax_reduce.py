"""The largest of floats and where it first stands: the order that every argmax kernel shares.

Of equal entries the first, both zeros alike, every NaN equal and above infinity: as `torch.argmax`.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_COLUMN = tl.constexpr(0x7FFFFFFF)
"""A column past every other."""
LEAST_KEY = tl.constexpr(-0x7FFFFFFF - 1)
"""A key below that of every float."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def first_of_largest(x, column):
    """Of each row of float32 x [rows, columns]: an int32 key, in the order of the floats, and the least of its entry's columns.

    `column` int32, of a shape that broadcasts to x's. What x holds outside the row is minus infinity at columns past the row's own.
    """
    largest = tl.reduce(x, 1, _larger)
    # Few operations an entry, since some callers hold a whole tile of a product: the key is made of the largest alone.
    top = largest[:, None]
    first = tl.min(tl.where((x == top) | (x != x), column, NO_COLUMN), 1)
    bits = largest.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(largest == 0.0, 0, key)
    return tl.where(largest != largest, 0x7FFFFFFF, key), first
