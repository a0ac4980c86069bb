"""RMS norm without a separate kernel: the preceding GEMM stores sums of squares, and the next GEMM scales its rows by them.

A row of the residual stream h is normed as `h * gain / rms(h)`. The gain is one factor per column, so the GEMM that adds to h also stores
`h * gain`, rounded, and the sums of squares of the columns that it computes. `1 / rms(h)` is one factor per row, so the next GEMM, which is
linear, can multiply its sums by it. The same holds for a norm of the first columns of any GEMM's output, such as the queries' latent.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """The additional outputs of a GEMM for the norm that reads its output h next.

    Attributes:
        gain: [columns], the norm's weight: all columns of the stream, or the first ones of another output.
        scaled: [M, columns] contiguous, the gain's dtype: `h * gain`.
        squares: float32 [M, parts] contiguous: partial sums of `h * h`, each over the columns of one program.
    """

    gain: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor

    def check(self, rows: int, columns: int, parts: int) -> None:
        """Assert that the buffers fit a GEMM with output [rows, columns] in `parts` programs per row."""
        shapes = tuple(tuple(tensor.shape) for tensor in (self.gain, self.scaled, self.squares))
        expected = ((columns,), (rows, columns), (rows, parts))
        assert shapes == expected, f"expected gain, scaled and squares of shapes {expected}; got {shapes}"
        assert self.squares.dtype is torch.float32, f"expected float32 squares; got {self.squares.dtype}"


@dataclass(frozen=True, slots=True)
class RowScale:
    """The factors of a GEMM's rows: `1 / sqrt(sum(squares) / K + eps)`, for K columns of x.

    Attributes:
        squares: float32 [M, parts] contiguous; the order of summation depends only on `parts`.
        eps: epsilon of the norm.
    """

    squares: torch.Tensor
    eps: float

    def check(self, rows: int) -> None:
        """Assert that there is one row of squares per row of the GEMM."""
        assert self.squares.shape[0] == rows, f"expected squares of {rows} rows; got {self.squares.shape[0]}"
        assert self.squares.dtype is torch.float32, f"expected float32 squares; got {self.squares.dtype}"


def deferred_buffers(deferred: DeferredNorm | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[None, None, None]:
    """The tensors passed to a kernel: gain, scaled and squares, or three None."""
    return (None, None, None) if deferred is None else (deferred.gain, deferred.scaled, deferred.squares)


class Norms(ctypes.Structure):
    """`Norms` in the CUDA sources."""

    _fields_ = (
        ("squares", ctypes.c_void_p),
        ("parts", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("gain", ctypes.c_void_p),
        ("scaled", ctypes.c_void_p),
        ("next_squares", ctypes.c_void_p),
        ("next_columns", ctypes.c_int),
        ("next_parts", ctypes.c_int),
    )


def norms_argument(scale: RowScale | None, deferred: DeferredNorm | None) -> Norms:
    """The kernel parameter that describes the preceding and the following norm."""
    read = (scale.squares.data_ptr(), scale.squares.shape[1], scale.eps) if scale is not None else (None, 0, 0.0)
    sizes = (0, 0) if deferred is None else (len(deferred.gain), deferred.squares.shape[1])
    return Norms(*read, *(None if tensor is None else tensor.data_ptr() for tensor in deferred_buffers(deferred)), *sizes)
