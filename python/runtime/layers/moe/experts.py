"""The stacked weights of a layer's experts, or this rank's shard of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.activation import Activation
from runtime.layers.moe.token_exchange import TokenExchange
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.scheme import QuantScheme, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The stacked weights of `count` experts. Outputs are partial sums if the group has more than one rank.

    All of them are routed experts, or the last is the shared one (`RoutingRule.shared`).

    Attributes:
        gate_up: [count, 2 * I, hidden]: the gate's I rows, then the up projection's, in any checkpoint's case.
        down: [count, hidden, I].
        gate_up_bias: [count, 2 * I], or None.
        down_bias: [count, hidden], or None; if several ranks share an expert, only one of them has it.
        count: number of experts on this rank.
        first: id of the first of them.
        total: number of experts on all ranks.
        shared: whether the last one is the shared expert, which all tokens use.
        size: (hidden, I) of the weights on this rank.
        exchange: exchanges tokens with other attention groups; None if all ranks have the same tokens.
    """

    gate_up: Storage
    down: Storage
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    count: int
    first: int = 0
    total: int
    shared: bool = False
    size: tuple[int, int]
    activation: Activation = Activation.SILU
    scheme: QuantScheme = DENSE
    group: ParallelGroup = ALONE
    exchange: TokenExchange | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        biases = [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]
        return [*self.gate_up.tensors, *self.down.tensors, *biases]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def without_last(self) -> Experts:
        """Views of all except the last, which is the shared one."""
        assert self.gate_up_bias is None, "experts stacked with a shared one have no bias"
        assert self.down_bias is None, "experts stacked with a shared one have no bias"
        gate_up, down = self.gate_up.at(slice(-1)), self.down.at(slice(-1))
        return replace(self, gate_up=gate_up, down=down, count=self.count - 1, total=self.total - 1, shared=False)

    def active_parameters(self, chosen: int) -> int:
        """Mean number of this rank's weights that are used for a token with `chosen` experts."""
        hidden, inner = self.size
        return 3 * hidden * inner * chosen * self.count // self.total
