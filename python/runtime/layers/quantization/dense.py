"""No quantisation: the weight in the activations' dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from runtime.layers.quantization.scheme import GemmCaps, LinearPart, Storage, WeightSlot, stacked


class Dense:
    """`QuantScheme` "none"."""

    name = "none"
    gemm_caps = GemmCaps(dense=True)

    def allocate(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        count: int | None = None,
        parts: Sequence[LinearPart] = (),
    ) -> Storage:
        """An empty [out, in] in `dtype`, or `count` of them."""
        return Storage(torch.empty(stacked(count, out_features, in_features), dtype=dtype, device=device))

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """One tensor, `prefix.weight`."""
        return {part.prefix + ".weight": WeightSlot(part.shape, part.index, storage.weight[part.rows].copy_)}

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
        """`F.linear`."""
        return F.linear(x, storage.weight, bias)

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """The weight."""
        return storage.weight.to(dtype)

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """The rows."""
        return Storage(storage.weight[rows])


DENSE = Dense()
"""The one instance: it has no state."""
