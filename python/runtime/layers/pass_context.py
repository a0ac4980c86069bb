"""The context of a running pass for the parts of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.rope import Rope, RopeFactors
from runtime.mem_cache.kv_pool import KVPool
from runtime.mem_cache.state_pool import StatePass


@dataclass(frozen=True, slots=True)
class PassContext:
    """One pass: its tokens, the KV pool it writes and the backend that attends over it.

    Attributes:
        batch: positions, slots and lengths.
        kv_pool: the model's KV pool.
        backend: planned for `batch` (`plan_pass`).
        states: what the pass does with recurrent states; None for a model without linear attention.
    """

    batch: ForwardBatch
    kv_pool: KVPool
    backend: AttentionBackend
    states: StatePass | None = None
    _factors: dict[Rope, RopeFactors] = field(default_factory=dict, init=False)
    _query_scales: dict[Rope, torch.Tensor] = field(default_factory=dict, init=False)

    def rope_factors(self, rope: Rope) -> RopeFactors:
        """`rope.factors` of the tokens' positions, cached for layers with the same table."""
        if rope not in self._factors:
            self._factors[rope] = rope.factors(self.batch.positions)
        return self._factors[rope]

    def query_scales(self, rope: Rope) -> torch.Tensor | None:
        """`rope.query_scales` of the tokens' positions, float32 [T, 1], cached like `rope_factors`; None for 1."""
        if rope.query_scales is None:
            return None
        if rope not in self._query_scales:
            self._query_scales[rope] = rope.query_scales.index_select(0, self.batch.positions)[:, None]
        return self._query_scales[rope]
