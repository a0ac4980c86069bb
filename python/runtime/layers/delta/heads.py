"""The heads of a linear-attention layer with the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DeltaHeads:
    """How the rows of a layer's projections become queries, keys, values and gates; this rank's heads.

    Attributes:
        num_key_heads: G, the heads of queries and keys; each serves H / G neighbouring value heads.
        num_value_heads: H.
        key_dim, value_dim: size of a key and of a value.
        conv_weight: [C, conv_width] in the model's dtype, the causal convolution over each channel; the last column is the current token's.
            C = 2 * G * key_dim + H * value_dim: queries, keys, values.
        decay_log: float32 [H], the logarithm of each head's decay rate (`A_log`).
        decay_bias: float32 [H], added to the decay's input (`dt_bias`).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: torch.Tensor
    decay_log: torch.Tensor
    decay_bias: torch.Tensor

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Tokens that the convolution reads."""
        return self.conv_weight.shape[1]
