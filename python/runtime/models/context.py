"""What all parts of a model share: operations, types, the quantisation scheme, and the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from runtime.config.quant_config import QuantConfig
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.moe.token_exchange import TokenExchange
from runtime.layers.ops import BlockOps
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.registry import quant_scheme
from runtime.layers.quantization.scheme import QuantScheme


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What all parts of a model share; a draft head uses its target's.

    Attributes:
        dtype: of weights and activations; the residual stream is float32.
        scheme: how the weights of linear layers are stored.
        group: the ranks that share the model, or with attention groups everything but the experts.
        quant: says which layers the scheme does not apply to; None if it applies to all.
        ep_size: groups of ranks that the experts of a sparse model are placed on; 1 shards every expert over all ranks.
        kv_dtype: dtype of a KV cache with scales; None for one in `dtype`.
        exchange: exchanges tokens between attention groups, which share the experts; None for one group.
        head_group: the ranks that share the LM head if each holds whole blocks; None if `group` shares it.
        fuse_shared: whether a shared expert is stacked with the routed ones if possible.
    """

    ops: BlockOps
    dtype: torch.dtype
    device: torch.device
    scheme: QuantScheme = DENSE
    group: ParallelGroup = ALONE
    quant: QuantConfig | None = None
    ep_size: int = 1
    kv_dtype: torch.dtype | None = None
    exchange: TokenExchange | None = None
    head_group: ParallelGroup | None = None
    fuse_shared: bool = True

    def with_blocks_of(self, group: ParallelGroup | None) -> ModelContext:
        """This context with blocks shared by the ranks of `group`, unchanged for None. The LM head stays sharded as it is, and experts are
        placed on no more groups than there are ranks.
        """
        if group is None:
            return self
        ranks = group.size * (1 if self.exchange is None else self.exchange.group.size)
        return replace(self, group=group, head_group=self.head_group or self.group, ep_size=math.gcd(self.ep_size, ranks))

    def for_draft(self, quant: QuantConfig | None) -> ModelContext:
        """The context of a draft head whose own weights are stored as `quant` says. For None they are in 16 bits, or like the
        target's LM head if a flag, not the checkpoint, asks for its quantisation.
        """
        if self.quant is None and quant is None:
            return replace(self, scheme=self.scheme.heads(self.device))
        return replace(self, scheme=quant_scheme(quant), quant=quant)
