"""The stacked weights of one projection of a layer's experts, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.layers.kernels.weight_step import DENSE, FP8, MXFP4


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E matrices [N, K] in one of four formats, and what kernels need to know of them.

    Attributes:
        weight: [E, N, K] in the activations' dtype, or e4m3; or uint8 [E, N, K / 2] of MXFP4, where each 16 bytes hold 32
            columns: the first 16 in the low nibbles, the others in the high ones.
        scale: None; float32 [E, N], one for each row; float32 [E, blocks of rows, blocks of columns]; or uint8
            [E, N, K / 32] of MXFP4. Sizes of blocks are powers of two.
        bias: [E, N], or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def format(self) -> int:
        """`DENSE`, `FP8` or `MXFP4`."""
        return DENSE.value if self.scale is None else MXFP4.value if self.weight.dtype is torch.uint8 else FP8.value

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N, K."""
        experts, rows, stored = self.weight.shape
        return experts, rows, stored * 2 if self.format == MXFP4.value else stored

    @property
    def scale_layout(self) -> tuple[int, int, int, int]:
        """Scales of an expert, scales of a row of blocks, rows of a block, columns of a block."""
        _, N, K = self.shape
        if self.scale is None:
            return 0, 0, 1, K
        if self.scale.dim() == 2:
            return N, 1, 1, _block(K, 1)
        _, rows, columns = self.scale.shape
        return rows * columns, columns, *(_block(size, count) for size, count in ((N, rows), (K, columns)))


def _block(size: int, count: int) -> int:
    """The largest power of two up to 128 by which `size` makes `count` blocks; for one block, any that holds it."""
    if count == 1:
        return max(128, 1 << (size - 1).bit_length())
    found = next((length for length in (128, 64, 32, 16, 8, 4, 2, 1) if -(-size // length) == count), None)
    assert found is not None, f"expected scales of blocks of a power of two up to 128; got {count} for {size}"
    return found
