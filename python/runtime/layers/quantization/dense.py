"""No quantisation: the weight in the activations' dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.layers.quantization.scheme import LinearPart, NewWeight, QuantScheme, Storage, WeightSlot
from runtime.layers.quantization.stable_rows import linear


class Dense(QuantScheme):
    """`QuantScheme` "none"."""

    name = "none"
    gemm_format = "dense"

    def allocate(self, new: NewWeight) -> Storage:
        """An empty matrix in the activations' dtype."""
        return Storage(new.empty(new.out_features, new.in_features, dtype=new.dtype))

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """One tensor, `prefix.weight`."""
        return {part.prefix + ".weight": WeightSlot(part.shape, part.index, storage.weight[part.rows].copy_)}

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
        """`F.linear`; in bfloat16 on a CPU with the same bits for a row of any pass, if a trial finds a way."""
        return linear(x, storage.weight, bias, in_prompt)

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """The weight."""
        return storage.weight.to(dtype)


DENSE = Dense()
"""The one instance: it has no state."""
