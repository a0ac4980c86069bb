"""Attention of a model whose layers have different heads: one backend for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from runtime.layers.attention.base import AttentionBackend, AttentionSpec
from runtime.layers.forward_batch import ForwardBatch


class MixedHeadsAttention(AttentionBackend):
    """`AttentionBackend` that passes each layer to the backend for its kind of heads. All of these plan every pass."""

    def __init__(self, backends: Sequence[AttentionBackend], by_layer: Sequence[int]) -> None:
        """`by_layer`: for each layer, the index in `backends`."""
        self.caps = replace(backends[0].caps, ragged_windows=all(backend.caps.ragged_windows for backend in backends))
        self._backends, self._by_layer = list(backends), list(by_layer)

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Choose the buffers of the passes."""
        for backend in self._backends:
            backend.prepare(batch, num_passes)

    def plan_on_device(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Plan from the lengths on the device."""
        for backend in self._backends:
            backend.plan_on_device(batch, num_passes)

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, key_dim] -> [T, H * value_dim]."""
        return self._backends[self._by_layer[layer.layer_id]].forward(q, layer, batch)

    def forward_rows(self, qkv: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor | None:
        """`forward_rows` of the layer's backend. [T, (H + 2 G) * D] -> [T, H * D], or None."""
        return self._backends[self._by_layer[layer.layer_id]].forward_rows(qkv, layer, batch)

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """The runs of all backends."""
        return [run for backend in self._backends for run in backend.warmup_runs(sizes, width, tree)]
