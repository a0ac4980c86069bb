"""The layout of the scales of an e4m3 or int4 matrix, for kernels."""

from __future__ import annotations

import torch

from runtime.config.quant_config import BLOCK, block_length


def scale_layout(rows: int, columns: int, scale: torch.Tensor) -> tuple[int, int, int]:
    """The layout of the scales of a matrix [rows, columns]: numbers per row of blocks, rows per block, columns per block.

    `scale` is float32 [rows], one per row, or float32 [blocks of rows, blocks of columns] with block sizes that are powers of two up to
    128; for int4, float16 [rows, groups of columns, 2], a scale and a zero point.
    """
    if scale.dim() == 3:
        return 2 * scale.shape[1], 1, columns // scale.shape[1]
    if scale.dim() == 1:
        return 1, 1, _block(columns, 1)
    return scale.shape[1], _block(rows, scale.shape[0]), _block(columns, scale.shape[1])


def num_columns(weight: torch.Tensor) -> int:
    """Columns of a stored weight; int4 has two in a byte."""
    return weight.shape[1] * (2 if weight.dtype is torch.uint8 else 1)


def _block(size: int, count: int) -> int:
    """The largest power of two up to 128 that divides `size` entries into `count` blocks; for one block, any power of two of at least
    `size`.
    """
    if count == 1:
        return max(BLOCK, 1 << (size - 1).bit_length())
    return block_length(size, count)
