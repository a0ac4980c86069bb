"""The contract between attention layers and attention backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime.config.attention_caps import AttentionCaps
from runtime.config.device_tuning import DeviceTuning
from runtime.layers.attention.kernel_choices import KernelChoices
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.rope import RotaryHeads
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """The attention of one layer.

    Attributes:
        layer_id: index of the layer in its model's KV pool.
        num_q_heads: H, the query heads.
        kv: the layout of the layer's KV cache.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: number of keys before its own that a query sees; -1 for all.
        causal: whether a query sees only keys up to its own; otherwise it sees all keys of its request, and `window` limits those before
            it.
        sinks: [H] of any float dtype, one extra score per head that is part of the softmax and has no value; or None.
        kv_scales: float32 [2], factors of stored keys and values; only if `kv.scaled`.
        heads: how a row of the qkv projection becomes heads; None for latent attention.
        softcap: c in scores = c * tanh(scores / c), before the mask; 0 for none. All layers of a model have the same.
    """

    layer_id: int
    num_q_heads: int
    kv: KVSpec
    scale: float
    window: int = -1
    sinks: torch.Tensor | None = None
    causal: bool = True
    kv_scales: torch.Tensor | None = None
    heads: RotaryHeads | None = None
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionShape:
    """The attention layers of one model, and the largest passes for which a backend allocates buffers.

    Attributes:
        layers: the layers, in order of `layer_id`.
        max_batch_size: requests of a fixed-width pass, including padding.
        max_tokens_per_req: queries of one request in a fixed-width pass.
        max_context_len: the longest KV, including positions that a step writes beyond the committed length.
        max_prompt: queries of the widest fixed-width pass of a single request; 0 if none is wider than `max_tokens_per_req`.
        tuning: measured constants of the GPU.
        choices: the kernels chosen by start-up timing, if a backend has several; one object for the life of a model.
        dtype: dtype of the queries if KV is 8-bit.
    """

    layers: tuple[AttentionSpec, ...]
    max_batch_size: int
    max_tokens_per_req: int
    max_context_len: int
    max_prompt: int = 0
    tuning: DeviceTuning = field(kw_only=True)
    choices: KernelChoices = field(default_factory=KernelChoices)
    dtype: torch.dtype = torch.bfloat16

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of the layers, smallest first."""
        return tuple(sorted({layer.window for layer in self.layers}))

    @property
    def num_q_heads(self) -> int:
        """H of the first layer, and of every layer if the backend has no `mixed_heads`."""
        return self.layers[0].num_q_heads

    @property
    def num_kv_heads(self) -> int:
        """G of the first layer."""
        return self.layers[0].kv.num_heads

    @property
    def head_dim(self) -> int:
        """Key dimension of the first layer."""
        return self.layers[0].kv.key_dim


class AttentionBackend(Protocol):
    """Attention over the paged KV pool. The KV of the pass is already in the pool when `forward` is called. Subclass it explicitly.

    Before each eager pass, capture and replay, `prepare` and then `plan_on_device` must be called (`plan_pass` calls both). They write in
    place into buffers that the backend owns. `forward` can be captured: it has no host reads and no allocation that depends on values.
    """

    caps: AttentionCaps

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        """Allocate buffers for passes up to `shape`, which `build_backend` has checked against `caps`."""
        ...

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """On the host, outside any graph: choose the buffers of `num_passes` passes, and plan from host bounds.

        Pass `i` runs with `seq_lens + i * tokens_per_req` and `batch.pass_index == i`. With a tree mask its tail is `tree_tail + i *
        tokens_per_req`, so the keys before the tail are the same in every pass. Ragged passes are planned here completely, except captured
        ones (`max_queries`), which are planned like fixed-width passes.
        """
        ...

    def plan_on_device(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Plan fixed-width passes from the lengths on the device; by default `prepare` plans them. With `caps.plan_on_device` it may be
        captured.
        """

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, key_dim] -> [T, H * value_dim], the dtype of q."""
        ...

    def forward_rows(self, qkv: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor | None:
        """`rope_and_cache` and `forward` in one kernel, if there is one for the planned pass and `layer.heads`; can be captured.

        Args:
            qkv: [T, (H + 2 G) * head_dim], contiguous.

        Returns:
            [T, H * head_dim]; or None, without having done anything, for all other passes.
        """
        return None

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """Functions that compile the kernels for passes of `width` queries at these batch sizes.

        They may run in any order and concurrently, and use none of the backend's buffers. Other kernels are compiled at their first use.
        """
        return []

    def shared_warmup_runs(self, sizes: Sequence[int], width: int) -> list[Callable[[], object]]:
        """`warmup_runs` of passes over a prefix that all requests share, for backends that support it."""
        return []


def plan_pass(backend: AttentionBackend, batch: ForwardBatch, num_passes: int = 1) -> None:
    """Plan `num_passes` passes over `batch`, outside any graph."""
    backend.prepare(batch, num_passes)
    backend.plan_on_device(batch, num_passes)
