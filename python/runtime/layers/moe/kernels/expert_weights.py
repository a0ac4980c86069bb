"""The stacked weights of one projection of a layer's experts, for kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.config.expert_tuning import WeightFormat
from runtime.layers.kernels.scale_layout import scale_layout
from runtime.layers.quantization.mxfp4 import GROUP, ROWS


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E matrices [N, K] in one of five formats, as kernels need them.

    Attributes:
        weight: [E, N, K] in the activations' dtype, or e4m3; uint8 [E, N / 8, K / 32, 8, 16] of MXFP4, as `quantization.mxfp4` stores
            it; or uint8 [E, N, K / 2] of int4: byte i of each 16 has the code of column i of 32 in its low four bits, that of column
            16 + i in the others.
        scale: None; float32 [E, N], one for each row; float32 [E, blocks of rows, blocks of columns]; uint8 [E, N, K / 32] of MXFP4; or
            float16 [E, N, K / group, 2] of int4: scale and zero point. Sizes of blocks and groups are powers of two, of groups at least 32.
        bias: [E, N], or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def format(self) -> WeightFormat:
        """The format of the weights."""
        if self.scale is None:
            return "dense"
        if self.weight.dtype is not torch.uint8:
            return "fp8"
        return "int4" if self.scale.dtype is torch.float16 else "mxfp4"

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N, K."""
        if self.format == "mxfp4":
            experts, rows, columns = self.weight.shape[:3]
            return experts, rows * ROWS, columns * GROUP
        experts, rows, columns = self.weight.shape
        return experts, rows, 2 * columns if self.format == "int4" else columns

    @property
    def group(self) -> int:
        """Columns of an int4 group; 0 for other formats."""
        return self.scale_layout[3] if self.format == "int4" else 0

    @property
    def scale_layout(self) -> tuple[int, int, int, int]:
        """Scales of an expert, scales of a row of blocks, rows of a block, columns of a block; zero points of int4 count as scales."""
        _, N, K = self.shape
        if self.scale is None:
            return 0, 0, 1, K
        if self.format == "mxfp4":
            return self.scale.shape[1:].numel(), K // GROUP, 1, GROUP
        if self.format == "int4":
            return self.scale.shape[1:].numel(), self.scale.shape[2:].numel(), 1, K // self.scale.shape[2]
        return self.scale[0].numel(), *scale_layout(N, K, self.scale[0])
