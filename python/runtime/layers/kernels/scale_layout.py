"""How the float32 scales of an e4m3 matrix lie, as kernels are told."""

from __future__ import annotations

import torch

from runtime.config.quant_config import BLOCK, block_length


def scale_layout(rows: int, columns: int, scale: torch.Tensor) -> tuple[int, int, int]:
    """How the float32 scales of an e4m3 matrix [rows, columns] lie: scales of a row of blocks, rows and columns of a block.

    `scale` is [rows], one for each row, or [blocks of rows, blocks of columns], which are powers of two up to 128.
    """
    if scale.dim() == 1:
        return 1, 1, _block(columns, 1)
    return scale.shape[1], _block(rows, scale.shape[0]), _block(columns, scale.shape[1])


def _block(size: int, count: int) -> int:
    """The largest power of two up to 128 by which `size` makes `count` blocks; for one block, any that holds it."""
    if count == 1:
        return max(BLOCK, 1 << (size - 1).bit_length())
    return block_length(size, count)
