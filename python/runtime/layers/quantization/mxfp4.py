"""MXFP4 weights, as in gpt-oss: e2m1 numbers with a power of two as the scale of each 32 columns of a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import AtMost, LinearPart, NewWeight, QuantScheme, Storage, WeightSlot

GROUP = 32
"""Columns that share a scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of codes 0 to 7; codes 8 to 15 are their negatives."""
BIAS = 127
"""The value of a scale byte s is 2 ** (s - 127)."""
ROWS = 8
"""Rows of a core matrix."""
LARGEST = 128
"""Largest scale byte: a kernel multiplies by 2 ** 126 times the scale, which must fit into bfloat16."""


class Mxfp4(QuantScheme):
    """Weights in MXFP4 (e2m1), with a power of two as the scale of each 32 columns.

    `weight` is uint8 [out / 8, in / 32, 8, 16], two codes per byte, and `scale` uint8 [out, in / 32].
    Byte i of the 16 bytes with a common scale has the codes of columns i and i + 16 (`packed`), so kernels read both in column order. Eight
    such rows, a core matrix of the tensor cores, are adjacent in memory, followed by the core matrix of the next columns: a kernel reads
    long runs of bytes, in the order that `ldmatrix` needs. Activations keep 16 bits. Source: OCP Microscaling Formats specification 1.0.
    """

    name = "mxfp4"
    gemm_format = None

    def allocate(self, new: NewWeight) -> Storage:
        """Empty codes and scales, for activations of any dtype."""
        out, columns = new.out_features, new.in_features
        if columns % GROUP:
            raise ConfigError(f"an mxfp4 weight has {columns} columns; only multiples of {GROUP} are supported")
        if out % ROWS:
            raise ConfigError(f"an mxfp4 weight has {out} rows; only multiples of {ROWS} are supported")
        groups = columns // GROUP
        return Storage(new.empty(out // ROWS, groups, ROWS, GROUP // 2, dtype=torch.uint8), new.empty(out, groups, dtype=torch.uint8))

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """`prefix.weight_blocks` uint8 [out, in / 32, 16] and `prefix.weight_scales` uint8 [out, in / 32]."""
        (out, width), (rows, columns) = part.shape, part.index
        if columns.start % GROUP or columns.stop % GROUP:
            raise ConfigError(
                f"{part.prefix}: columns {columns.start} to {columns.stop} of a rank cut an mxfp4 scale; use another --tp-size"
            )
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        first, stop = part.rows.start, part.rows.stop
        assert first % ROWS == 0 == stop % ROWS, f"{part.prefix}: rows {first} to {stop} cut a core matrix"
        weight, scale = storage.weight[first // ROWS : stop // ROWS], storage.scales[part.rows]
        return {
            part.prefix + ".weight_blocks": WeightSlot(
                (out, width // GROUP, GROUP // 2),
                (rows, groups, slice(0, GROUP // 2)),
                lambda codes: weight.copy_(core_matrices(_regroup(codes))),
                torch.uint8,
            ),
            part.prefix + ".weight_scales": WeightSlot(
                (out, width // GROUP), (rows, groups), scale.copy_, torch.uint8, rule=AtMost(LARGEST)
            ),
        }

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """Each value times its scale: exact in bfloat16 and float32."""
        table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=storage.weight.device)
        values = table[torch.cat(unpacked(_rows(storage.weight)), dim=-1).to(torch.int32)]
        return torch.ldexp(values, storage.scales.to(torch.int32)[..., None] - BIAS).to(dtype).flatten(-2)

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """As in `QuantScheme`, but rows must be whole core matrices."""
        return Storage(core_matrices(_rows(storage.weight)[rows]), storage.scales[rows])


def core_matrices(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., out, in / 32, 16] in the order of the storage: [..., out / 8, in / 32, 8, 16]."""
    return codes.unflatten(-3, (-1, ROWS)).transpose(-3, -2).contiguous()


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """The bytes [..., out, in / 32, 16] of `weight` [..., out / 8, in / 32, 8, 16]."""
    return weight.transpose(-3, -2).flatten(-4, -3)


def packed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Pack two codes per byte.

    Sign, two exponent bits and mantissa bit of the second code are bits 7, 3, 2 and 1, as in the high byte of a float16, so a kernel only
    masks them. The first code's sign is bit 0, and its other bits are 6, 5 and 4.
    """
    return (second & 8) << 4 | (first & 7) << 4 | (second & 7) << 1 | first >> 3


def unpacked(byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second code of each byte."""
    return byte >> 4 & 7 | (byte & 1) << 3, byte >> 1 & 7 | byte >> 4 & 8


def _regroup(codes: torch.Tensor) -> torch.Tensor:
    """Reorder bytes [..., 16] of a checkpoint, whose two codes are neighbouring columns, for the storage."""
    columns = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return packed(columns[..., : GROUP // 2], columns[..., GROUP // 2 :])
