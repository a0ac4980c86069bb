"""RMS norm without a kernel of its own: the product before it leaves what it needs, the product after it applies it.

A row of the stream h is normed as `h * gain / rms(h)`. The first factor needs one column at a time, so the product that adds to h stores
`h * gain`, rounded, beside h, and the sums of squares of the columns it has. The second is one number a row, and a product is linear: the
next one multiplies its own sums by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NormAhead:
    """What a product that adds to the stream also writes, for the norm that follows.

    Attributes:
        gain: [hidden], the norm's weight.
        scaled: [M, hidden] contiguous, the gain's dtype: `h * gain`.
        squares: float32 [M, parts] contiguous: sums of `h * h` over the columns of one program each.
    """

    gain: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor

    def check(self, rows: int, columns: int, parts: int) -> None:
        """That there is room for what a product of `rows` x `columns` writes in `parts`."""
        gain, scaled, squares = (tuple(tensor.shape) for tensor in (self.gain, self.scaled, self.squares))
        assert (gain, scaled) == ((columns,), (rows, columns)), f"for {rows} x {columns} sums: gain of {gain}, scaled of {scaled}"
        assert squares == (rows, parts), f"squares are {rows} x {parts}, not of {squares}"
        assert self.squares.dtype is torch.float32, f"squares are float32, not {self.squares.dtype}"


@dataclass(frozen=True, slots=True)
class RowScale:
    """What a product multiplies its rows by: `1 / sqrt(sum(squares) / K + eps)`, for K columns of x.

    Attributes:
        squares: float32 [M, parts] contiguous, added in an order that `parts` fixes.
        eps: of the norm.
    """

    squares: torch.Tensor
    eps: float

    def check(self, rows: int) -> None:
        """That these are the sums of so many rows."""
        assert self.squares.shape[0] == rows, f"squares of {self.squares.shape[0]} rows to scale {rows}"
        assert self.squares.dtype is torch.float32, f"squares are float32, not {self.squares.dtype}"
