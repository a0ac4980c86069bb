"""What becomes of the sums of a matrix product before they are stored: said in one way to every kernel that computes one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.layers.gemm.deferred_norm import NormAhead, RowScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What is done, in float32 and in this order, to the sums [M, N] of `x @ weight.T`, for M rows of x and N of the weight.

        sums = sums * scale              # each row by a number of its own
        sums = sums + bias
        sums = silu(gate) * up           # with `silu`: sums are [gate, up]
        out = out + sums if add else sums
        ahead.scaled = out * ahead.gain
        ahead.squares = partial sums of out * out

    Attributes:
        bias: [N], the weight's dtype.
        silu: the weight holds gate rows, then up rows, and `out` is [M, N / 2] instead of [M, N]; not with `add`.
        add: `out` is added to, not written over.
        scale: of the rows, by the norm of what x was made of.
        ahead: with `add` and a float32 `out`: what is also written, for the norm of `out` that follows.
    """

    bias: torch.Tensor | None = None
    silu: bool = False
    add: bool = False
    scale: RowScale | None = None
    ahead: NormAhead | None = None

    def columns(self, weight_rows: int) -> int:
        """Those of `out`."""
        return weight_rows // 2 if self.silu else weight_rows

    def check(self, out: torch.Tensor | None, rows: int, weight_rows: int, parts: int) -> None:
        """That all of it fits together and belongs to a product of these rows.

        Args:
            out: what is written; None where only its largest entries are.
            rows: of x.
            weight_rows: of the weight.
            parts: columns of `ahead.squares`, as the product is cut.
        """
        shape = (rows, self.columns(weight_rows))
        assert out is None or tuple(out.shape) == shape, f"the product is {shape[0]} x {shape[1]}, not of {tuple(out.shape)}"
        assert not (self.silu and self.add), "gated sums are not added to anything"
        if self.bias is not None:
            assert tuple(self.bias.shape) == (weight_rows,), f"a bias of {tuple(self.bias.shape)} for {weight_rows} rows of a weight"
        if self.scale is not None:
            self.scale.check(rows)
        if self.ahead is not None:
            assert self.add, "what is ahead is made of rows that were added to"
            assert out is not None and out.dtype is torch.float32, "what is ahead is made of float32 rows"  # noqa: PT018
            self.ahead.check(*shape, parts)


NOTHING = Epilogue()
"""The sums themselves."""
