"""The layout of one attention layer's KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of one layer, as its attention declares it.

    Attributes:
        kind: "gqa" stores keys and values per KV head; "mla" stores one latent row per slot, whose first `value_dim`
            columns are also the values.
        num_heads: G, the KV heads; 1 for "mla".
        key_dim, value_dim: size of a key and of a value.
        dtype: the stored dtype.
        scaled: whether stored values are 8-bit numbers that are multiplied by a scale of the layer when they are read.
    """

    kind: Literal["gqa", "mla"]
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scaled: bool = False

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token takes in this layer."""
        columns = self.key_dim if self.kind == "mla" else self.key_dim + self.value_dim
        return self.num_heads * columns * self.dtype.itemsize
