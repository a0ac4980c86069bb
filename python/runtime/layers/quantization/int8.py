"""Weight-only int8 for the CPU: int8 rows, quantised as they are loaded, with one scale per row."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from runtime.layers.quantization.scheme import LinearPart, NewWeight, QuantScheme, Storage, WeightSlot
from runtime.layers.quantization.stable_rows import in_blocks

QUANTIZED_AT_ONCE = 2**18
"""Weights quantised at a time: the float32 values of a whole matrix would not stay in the caches, which we measured to be 5 times
slower."""
COLUMN_MULTIPLE, ROW_MULTIPLE = 32, 4
"""The packed kernel reads whole vectors: with other shapes it would read beyond the rows."""


class Int8(QuantScheme):
    """Weights in int8, with a bfloat16 scale for each row.

    `weight` is int8 [out, in] and `scale` [out]; the value of row i is `weight[i] * scale[i]`.
    Activations are rounded to bfloat16, because the kernel for float32 is not vectorised (measured 14 times slower). Rows are quantised
    with the scale rounded to bfloat16, so the rounding of the scale adds no error.
    """

    name = "int8"
    gemm_format = None

    def allocate(self, new: NewWeight) -> Storage:
        """Empty rows and scales, for activations of any dtype."""
        weight = new.empty(new.out_features, new.in_features, dtype=torch.int8)
        return Storage(weight, new.empty(new.out_features, dtype=torch.bfloat16))

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """One tensor, `prefix.weight`, of any floating-point dtype; it is quantised when it is stored.

        Whole rows are read, because the scale of a rank's columns is that of the whole row.
        """
        rows, columns = part.index

        def put(whole: torch.Tensor) -> None:
            count, weight, scale = max(1, QUANTIZED_AT_ONCE // whole.shape[1]), storage.weight[part.rows], storage.scales[part.rows]
            for some, own, scales in zip(whole.split(count), weight.split(count), scale.split(count), strict=True):
                quantized, found = quantize_rows(some.to(weight.device)).tensors
                own.copy_(quantized[:, columns])
                scales.copy_(found)

        return {part.prefix + ".weight": WeightSlot(part.shape, (rows, slice(0, part.shape[1])), put, finite=True)}

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
        """[T, in] -> [T, out], the dtype of `x`.

        The bits of a row's result do not depend on the other rows, but a prompt pass may give it others than a decode pass. For more than
        32 rows a single bfloat16 GEMM would be faster than the packed kernel, but would not keep the bits. Without AVX-512 the packed
        kernel is faster for prompts, too.
        """
        rows, (out_features, columns) = x.bfloat16(), storage.weight.shape
        packable = columns % COLUMN_MULTIPLE == 0 and out_features % ROW_MULTIPLE == 0
        if packable and not (in_prompt and prompts_use_gemms()):
            out = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), storage.weight, storage.scales)
        else:
            out = blocked_matmul(rows, storage.weight.to(torch.bfloat16)).mul_(storage.scales)
        out = out.type_as(x)
        return out if bias is None else out.add_(bias)

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """Rows times their scales."""
        return (storage.weight.float() * storage.scales.float()[..., None]).to(dtype)


def blocked_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` for bfloat16 `x` [T, in], by GEMMs of one size, because a CPU sums a row differently in GEMMs of different sizes."""
    return in_blocks(x, weight, None, (block_rows(),))


def prompts_use_gemms() -> bool:
    """Whether a prompt is faster with bfloat16 GEMMs than with the packed kernels. Without AVX-512 it is not: oneDNN does not vectorise
    them.
    """
    return torch.backends.cpu.get_cpu_capability() != "AVX2"


@functools.cache
def block_rows() -> int:
    """Rows of the GEMMs into which a prompt is split: more with AMX, where 128 rows take about twice as long as 32."""
    cpu = Path("/proc/cpuinfo")
    return 128 if cpu.is_file() and "amx_bf16" in cpu.read_text() else 32


def quantize_rows(rows: torch.Tensor) -> Storage:
    """Quantise each row symmetrically.

    Args:
        rows: [out, in], any float dtype.

    Returns:
        int8 [out, in] in -127..127, and bfloat16 scales [out], with `rows ≈ int8 * scale`.
    """
    rows = rows.float()
    # With a scale rounded down, the largest entry would exceed 127; 2 ** -8 is half a bfloat16 step, relative.
    scale = (rows.abs().amax(dim=1).clamp_(min=1e-20) / 127 * (1 + 2**-8)).to(torch.bfloat16)
    return Storage((rows / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale)
