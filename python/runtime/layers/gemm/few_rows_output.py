"""The epilogue of the CUDA C++ GEMM kernels for few rows (`few_rows_output.cu`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.kernels import fragments

MAX_ROWS = 16
"""With more rows, each block would read more of x than of the weights."""


@dataclass(frozen=True, slots=True)
class OutputVariant:
    """Compile-time parameters of a program other than the tiling: the maximum number of rows, and the epilogue.

    Attributes:
        pdl: whether it starts before the previous kernel has ended.
        write: 0 for bfloat16, 1 for float32, 2 to add to float32.
    """

    rows: int
    bias: bool
    pdl: bool
    silu: bool = False
    gelu: bool = False
    scale: bool = False
    deferred: bool = False
    write: int = 0

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, parts: int, pdl: bool) -> OutputVariant:
        """The variant for `out = epilogue(x @ weight.T)`, after checks. `parts`: sums of squares per row for a deferred norm.

        Without `add`, a deferred norm may also be one of the first columns of `out`, those of the first blocks.
        """
        M, wide = len(x), out.dtype is torch.float32
        assert 0 < M <= MAX_ROWS, f"expected 1 to {MAX_ROWS} rows; got {M}"
        assert x.dtype is torch.bfloat16, f"expected bfloat16 rows; got {x.dtype}"
        assert epilogue.argmax is None, "expected no argmax"
        if epilogue.deferred is None or epilogue.add:
            epilogue.check_gemm(x, weight, out, parts)
        else:
            replace(epilogue, deferred=None).check_gemm(x, weight, out, parts)
            columns, own = len(epilogue.deferred.gain), epilogue.columns(len(weight)) // parts
            assert columns % own == 0, f"expected a norm of a multiple of {own} columns; got {columns}"
            epilogue.deferred.check(M, columns, columns // own)
        narrow = out.dtype is torch.bfloat16 and not epilogue.add
        assert wide or narrow, f"expected a float32 out, or bfloat16 without add; got {out.dtype}"
        return cls(
            8 if M <= 8 else MAX_ROWS, epilogue.bias is not None, pdl, epilogue.silu, epilogue.gelu,
            epilogue.scale is not None, epilogue.deferred is not None, 2 if epilogue.add else int(wide),
        )  # fmt: skip

    def source(self, file: Path, cut: Mapping[str, int], *shared: Path) -> str:
        """The program: `fragments.cu`, `few_rows_output.cu`, other `shared` files and the kernel's `file`. `cut`: the tiling constants."""
        constants = dict(
            ACT=2 if self.gelu else 0, GATED=self.silu or self.gelu, TOKENS=self.rows, BIAS=self.bias, EARLY=self.pdl,
            SCALE=self.scale, DEFER=self.deferred, WRITE=self.write,
        )  # fmt: skip
        return fragments.source(file, {**constants, **cut}, Path(__file__).with_name("few_rows_output.cu"), *shared)
