"""Linear layers: a weight in the model's dtype, or the same weight stored as int8 rows."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch.nn import functional as F

INT8_DIRECT_ROWS = 16
"""Up to this many rows the packed int8 kernel is faster on a CPU, above it dequantisation and a bfloat16 GEMM (measured, AVX-512)."""
INT8_K_MULTIPLE = 32
INT8_N_MULTIPLE = 4


class Linear:
    """`x @ weight.T + bias`. Owner of both tensors.

    Attributes:
        weight: [out, in] in the model's dtype.
        bias: [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def empty(cls, out_features: int, in_features: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        """A layer whose rows are still to be filled with `put`."""
        weight = torch.empty((out_features, in_features), dtype=dtype, device=device)
        return cls(weight, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.weight.shape[1]

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Store `rows` [n, in] of any float dtype from row `start` on."""
        self.weight[start : start + len(rows)].copy_(rows)

    def __call__(self, x: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """[T, in] -> [T, out], the dtype of `x`. `in_prompt`: rows of a prompt pass."""
        return F.linear(x, self.weight, self.bias)


class Int8Linear(Linear):
    """A linear layer whose weight is int8 with one scale a row; activations enter as bfloat16 (weight-only, CPU).

    The float32-input form of the kernel is not vectorised (measured 14 times slower), so inputs are rounded to bfloat16. Scales are
    bfloat16 numbers and rows are quantised with the rounded scale, so that the scale itself adds no error.

    Attributes:
        weight: int8 [out, in].
        scale: bfloat16 [out]; weight row i stands for `weight[i] * scale[i]`.
        bias: [out] in the model's dtype, or None.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.scale = scale
        # The kernel reads whole vectors: other shapes would read past the rows.
        self._packable = weight.shape[1] % INT8_K_MULTIPLE == 0 and weight.shape[0] % INT8_N_MULTIPLE == 0

    @classmethod
    def empty(cls, out_features: int, in_features: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Int8Linear:
        """A layer whose rows are still to be filled with `put`; `dtype` is the bias's."""
        weight = torch.empty((out_features, in_features), dtype=torch.int8, device=device)
        scale = torch.empty(out_features, dtype=torch.bfloat16, device=device)
        return cls(weight, scale, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def quantize(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
        """The int8 form of a float weight [out, in]."""
        return cls(*quantize_rows(weight), bias)

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Quantise and store `rows` [n, in] from row `start` on."""
        self.weight[start : start + len(rows)], self.scale[start : start + len(rows)] = quantize_rows(rows)

    def dequantized(self) -> torch.Tensor:
        """The float32 weight that this layer computes with."""
        return self.weight.float() * self.scale.float()[:, None]

    def __call__(self, x: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """[T, in] -> [T, out], the dtype of `x`.

        A row's result is the same bits whatever other rows come along: of a prompt, and of up to `INT8_DIRECT_ROWS` rows otherwise.
        """
        out = self._matmul(x.to(torch.bfloat16), in_prompt).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)

    def _matmul(self, x: torch.Tensor, in_prompt: bool) -> torch.Tensor:
        if self._packable and x.shape[0] <= INT8_DIRECT_ROWS and not in_prompt:
            return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.weight, self.scale)
        weight = self.weight.to(torch.bfloat16)
        return (blocked_matmul(x, weight) if in_prompt else F.linear(x, weight)).mul_(self.scale)


def blocked_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` for bfloat16 `x` [T, in], by GEMMs of one size: how the CPU sums a row depends on how many rows a GEMM has."""
    size = block_rows()
    out = x.new_empty(-(-x.shape[0] // size) * size, weight.shape[0])
    for rows, block in zip(F.pad(x, (0, 0, 0, len(out) - len(x))).split(size), out.split(size), strict=True):
        torch.mm(rows, weight.T, out=block)
    return out[: x.shape[0]]


@functools.cache
def block_rows() -> int:
    """Rows of the GEMMs that a prompt is cut into: more where AMX makes rows of padding nearly free."""
    cpu = Path("/proc/cpuinfo")
    return 128 if cpu.is_file() and "amx_bf16" in cpu.read_text() else 32


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row.

    Args:
        rows: [out, in], any float dtype.

    Returns:
        int8 [out, in] in -127..127, and bfloat16 scales [out] with `rows ≈ int8 * scale`.
    """
    rows = rows.float()
    # A scale rounded down would push the largest entry past 127; 2 ** -8 is half a bfloat16 step, relative.
    scale = (rows.abs().amax(dim=1).clamp_(min=1e-20) / 127 * (1 + 2**-8)).to(torch.bfloat16)
    return (rows / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale
