"""The epilogue of a GEMM: the operations on its sums before they are stored. All GEMM kernels take the same description."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.kernels.scale_layout import num_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The operations, in float32 and in this order, on the sums [M, N] of `x @ weight.T`, for M rows of x and N of the
    weight.

        sums = sums * scale              # one factor per row
        sums = sums + bias
        sums = silu(gate) * up           # with `silu`, or with `gelu` its tanh form: sums are [gate, up]
        out = out + sums if add else sums
        deferred.scaled = out * deferred.gain
        deferred.squares = partial sums of out * out
        argmax = largest of the sums in each tile of columns

    Attributes:
        bias: [N], the weight's dtype.
        silu, gelu: the weight has gate rows, then up rows, and `out` is [M, N / 2] instead of [M, N]; not with `add`.
        add: add to `out` instead of overwriting it.
        scale: row scales, if a deferred norm precedes this GEMM.
        deferred: additional outputs for the norm that reads `out` next; requires `add` and a float32 `out`, except in kernels for few rows,
            which also take a norm of the first columns of another `out`.
        argmax: int32 [2, M, tiles] contiguous: the key of each tile's largest sum and its first column, by `tile_argmax`; `out` must then
            be None or float32. Not with `silu`, `gelu` or `add`.
    """

    bias: torch.Tensor | None = None
    silu: bool = False
    gelu: bool = False
    add: bool = False
    scale: RowScale | None = None
    deferred: DeferredNorm | None = None
    argmax: torch.Tensor | None = None

    @property
    def gated(self) -> bool:
        """Whether the GEMM is a gate and up projection."""
        return self.silu or self.gelu

    def columns(self, weight_rows: int) -> int:
        """Columns of `out`."""
        return weight_rows // 2 if self.gated else weight_rows

    def check(self, out: torch.Tensor | None, rows: int, weight_rows: int, parts: int) -> None:
        """Assert that the parts fit together and fit the GEMM.

        Args:
            out: the output; None if only the argmax of each tile is written.
            rows: rows of x.
            weight_rows: rows of the weight.
            parts: columns of `deferred.squares`, or tiles of `argmax`, by the GEMM's tiling.
        """
        shape = (rows, self.columns(weight_rows))
        assert out is not None or self.argmax is not None, "expected out or argmax"
        assert out is None or tuple(out.shape) == shape, f"expected out of shape {shape}; got {tuple(out.shape)}"
        assert self.silu + self.gelu + self.add <= 1, "silu, gelu and add exclude each other"
        if self.bias is not None:
            assert tuple(self.bias.shape) == (weight_rows,), f"expected a bias of {weight_rows} values; got {tuple(self.bias.shape)}"
        if self.scale is not None:
            self.scale.check(rows)
        if self.deferred is not None:
            assert self.add, "a deferred norm requires add"
            assert out is not None and out.dtype is torch.float32, "a deferred norm requires a float32 out"  # noqa: PT018
            self.deferred.check(*shape, parts)
        if self.argmax is not None:
            expected = (2, rows, parts)
            assert tuple(self.argmax.shape) == expected, f"expected argmax of shape {expected}; got {tuple(self.argmax.shape)}"
            assert not self.gated, "argmax excludes silu and gelu"
            assert not self.add, "argmax excludes add"
            assert out is None or out.dtype is torch.float32, f"argmax requires a float32 out; got {out.dtype}"

    def check_gemm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, parts: int) -> None:
        """Assert that x [M, K] can be multiplied by a weight [N, K], or in int4 [N, K / 2], and `check` the rest."""
        (M, K), N, columns = x.shape, len(weight), num_columns(weight)
        assert M > 0, "expected rows"
        assert columns == K, f"expected x of {columns} columns; got {K}"
        assert x.is_contiguous(), "expected a contiguous x"
        self.check(out, M, N, parts)


NO_EPILOGUE = Epilogue()
"""Store the sums as they are."""
