"""The contract of an attention backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """What a backend can do; a model or a flag that needs more is refused at start.

    Attributes:
        tree_mask: whether passes with `tree_mask` work where all layers see everything; `plan` may refuse them beside a window.
        page_sizes: page sizes it takes; None for any.
        head_dims: head dimensions it takes; None for any.
        cuda_graph: whether `forward` may be captured.
        sliding_window: whether layers with a window work.
    """

    tree_mask: bool
    page_sizes: frozenset[int] | None
    head_dims: frozenset[int] | None
    cuda_graph: bool
    sliding_window: bool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one model, and the largest passes that a backend must prepare for.

    Attributes:
        num_q_heads, num_kv_heads, head_dim: H, G and the size of a head.
        scale: what scores are multiplied with, usually head_dim ** -0.5.
        window: keys that a query sees before itself, by layer; -1 for all.
        max_batch_size: requests of a fixed-width pass, padding included.
        max_tokens_per_req: queries of one request in a fixed-width pass.
        max_steps: passes that one `plan` may prepare.
        max_context_len: the longest KV, including what a step writes past the committed length.
        max_prompt: queries of the widest fixed-width pass of a single request; 0 where none is wider than `max_tokens_per_req`.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: tuple[int, ...]
    max_batch_size: int
    max_tokens_per_req: int
    max_steps: int
    max_context_len: int
    max_prompt: int = 0


class AttentionBackend(Protocol):
    """Attention over the paged KV pool. KV of the pass is already in the pool when `forward` is called.

    Its type is the pool's. `plan` runs outside any graph: before each eager pass, before a capture and before every replay, always the same
    call, and writes in place into buffers that the backend owns. `forward` may be captured: no host reads, no allocation that depends on
    values.
    """

    caps: AttentionCaps

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        """Prepare for passes up to `shape`. Raises `ConfigError` for a type that the backend does not take."""
        ...

    def plan(self, batch: ForwardBatch, num_steps: int = 1) -> None:
        """Prepare `num_steps` passes over `batch`; pass `i` runs with `seq_lens + i * tokens_per_req` and `batch.step == i`.

        With a tree mask pass `i` has `tree_tail + i * tokens_per_req`, so that the keys before the tail are the same in every pass.
        """
        ...

    def forward(self, q: torch.Tensor, layer_id: int, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, head_dim] -> [T, H * head_dim], the dtype of q."""
        ...

    def first_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """Runs that have compiled what passes of `width` queries need at these batch sizes, in any order and side by side.

        They touch nothing of the backend's. Nothing has to be run first: what is not compiled by then is when it is met.
        """
        ...
