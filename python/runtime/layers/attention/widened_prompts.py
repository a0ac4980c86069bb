"""Prompts over an 8-bit KV cache: keys and values of a group of requests are converted to 16 bits for one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from runtime.layers.attention.base import AttentionSpec
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.widen_keys import widen_keys
from runtime.layers.attention.prompt_groups import grouped
from runtime.mem_cache.kv_pool import KVPool, PageTable

MIN_TOKENS = 8192
"""Minimum number of keys in the buffer: the prompts of a usual pass."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Requests of a ragged pass that attend together: all, or consecutive ones whose converted keys fit the buffer together.

    Attributes:
        keys: the location of their keys in the pool.
        table: the page table that attention reads: the pool's int32 [rows, columns], or the buffer's int32 [B, columns].
        cu_seqlens_q: int32 [B + 1], from 0.
        queries: their rows of the pass.
        max_queries: maximum queries of one request.
        metadata: FA3's tile schedules, int32, by window and whether the layer is causal.
    """

    keys: PagedKeys
    table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    queries: slice
    max_queries: int
    metadata: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict[tuple[int, bool], torch.Tensor])


class WidenedPrompts:
    """Owner of the buffer, which holds at least the longest context. Each group of each layer overwrites it."""

    def __init__(self, kv_pool: KVPool, page_table: PageTable, dtype: torch.dtype) -> None:
        self._pool, self._table = kv_pool, page_table
        self._pages = max(page_table.max_pages, -(-MIN_TOKENS // page_table.page_size))
        self._wide = torch.empty((2, self._pages, *kv_pool.k[0].shape[1:]), dtype=dtype, device=kv_pool.k[0].device)

    def warm_up(self) -> None:
        """Convert the padding page, to compile the kernel."""
        row, length = (torch.tensor([value], dtype=torch.int32, device=self._wide.device) for value in (0, 1))
        keys, scales = PagedKeys(self._table.pages, row, length, self._table.page_size), torch.ones(2, device=self._wide.device)
        widen_keys(self._pool.k[0], self._pool.v[0], keys, scales, 1, self._wide)

    def groups(
        self, requests: Sequence[tuple[int, int]], rows: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor
    ) -> list[PromptGroup]:
        """The groups of a pass. No host read.

        Args:
            requests: number of queries of each request, and an upper bound of its keys.
            rows: int32 [B].
            seq_lens: int32 [B].
            cu_seqlens_q: int32 [B + 1].
        """
        found, start, size = list[PromptGroup](), 0, self._table.page_size
        pages = [min(max(-(-keys // size), 1), self._table.max_pages) for _, keys in requests]
        for first, end in grouped(pages, self._pages):
            columns, queries = max(pages[first:end]), [queries for queries, _ in requests[first:end]]
            bounds = cu_seqlens_q[first : end + 1]
            table = torch.arange((end - first) * columns, dtype=torch.int32, device=rows.device).view(-1, columns)
            keys = PagedKeys(self._table.pages, rows[first:end], seq_lens[first:end], size)
            stop = start + sum(queries)
            found.append(PromptGroup(keys, table, bounds - bounds[:1], slice(start, stop), max(queries)))
            start = stop
        return found

    def widen(self, group: PromptGroup, layer: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert keys and values of a layer; each [pages, page_size, G, D], addressed by `group.table`."""
        assert layer.kv_scales is not None, "an 8-bit cache has scales"
        at = layer.layer_id
        widen_keys(self._pool.k[at], self._pool.v[at], group.keys, layer.kv_scales, group.table.shape[1], self._wide)
        k, v = self._wide
        return k, v
