"""Attention with heads wider than FA3's, in Triton: split-KV attention for few queries, a prefill kernel for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec
from runtime.layers.attention.decode_metadata import FixedLengths, first_tail
from runtime.layers.attention.kernels.paged_keys import CausalQueries, PagedKeys
from runtime.layers.attention.kernels.split_decode import SplitWorkspace, split_attention, warm_up
from runtime.layers.attention.kernels.split_shape import MAX_WIDTH, SplitShape, one_of_each_kernel, supports
from runtime.layers.attention.kernels.wide_prefill import wide_prefill
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels.pdl import starts_early
from runtime.mem_cache.kv_pool import KVPool, PageTable


@dataclass(frozen=True, slots=True)
class _FixedPlan:
    """Persistent metadata of fixed-width passes of one size; a captured graph reads these tensors. `split`: None for short prompts."""

    at: FixedLengths
    queries: CausalQueries
    split: SplitShape | None


class WideAttention(AttentionBackend):
    """`AttentionBackend` of layers with heads of 512. Causal, without trees and sinks."""

    caps = ATTENTION_CAPS["fa3"]

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        if shape.layers[0].kv.scaled:
            raise ConfigError(f"--kv-cache-dtype fp8_e4m3 is not possible with heads of {shape.head_dim}. Use auto.")
        self._shape, self._pool, self._table = shape, kv_pool, page_table
        self._dtype, self._device = kv_pool.k[0].dtype, kv_pool.k[0].device
        self._num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._pdl = starts_early(self._device)
        self._fixed: dict[tuple[int, int, int], _FixedPlan] = {}
        self._plan: _FixedPlan | tuple[PagedKeys, CausalQueries] | None = None
        widths = range(1, min(shape.max_tokens_per_req, MAX_WIDTH) + 1)
        shapes = [self._split_shape(size, width) for size in range(1, shape.max_batch_size + 1) for width in widths]
        self._workspace = SplitWorkspace([found for found in shapes if found is not None], self._device)

    # ---- outside the graph

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Select the buffers of the passes. No host read."""
        self._plan = self._fixed_plan(batch, num_passes) if batch.tokens_per_req else self._extend_plan(batch)

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """One run per kernel of split-KV attention."""
        shapes = [shape for size in sizes if (shape := self._split_shape(size, width)) is not None]
        windows = {layer.window for layer in self._shape.layers}
        return [
            partial(warm_up, shape, self._table.page_size, self._dtype, self._device, tree=False, window=window, sinks=False, pdl=self._pdl)
            for shape in one_of_each_kernel(shapes)
            for window in sorted(windows)
        ]

    # ---- inside or outside the graph

    def plan_on_device(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Compute lengths in place."""
        if isinstance(self._plan, _FixedPlan):
            self._plan.at.fill(batch)

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, head_dim] -> [T, H * head_dim]."""
        plan, q = self._plan, q.contiguous()
        assert plan is not None, "prepare comes before forward"
        k_cache, v_cache = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        if isinstance(plan, _FixedPlan):
            keys = PagedKeys(self._table.pages, batch.page_rows, plan.at.seq_lens(batch, batch.pass_index), self._table.page_size)
            queries, split = plan.queries, plan.split
        else:
            keys, queries, split = *plan, None
        if split is None:
            out = wide_prefill(q, k_cache, v_cache, keys, queries, layer.scale, layer.window)
        else:
            out = split_attention(q, k_cache, v_cache, keys, split, self._workspace, layer.scale, window=layer.window, pdl=self._pdl)
        return out.flatten(1)

    # ---- planning

    def _extend_plan(self, batch: ForwardBatch) -> tuple[PagedKeys, CausalQueries]:
        assert batch.extend_lens is not None
        keys = PagedKeys(self._table.pages, batch.page_rows, batch.seq_lens, self._table.page_size)
        return keys, CausalQueries(batch.qo_indptr, int(batch.extend_lens.max()))

    def _fixed_plan(self, batch: ForwardBatch, num_passes: int) -> _FixedPlan:
        assert not first_tail(batch, (0,), "fa3"), "trees are refused"
        size, width = batch.batch_size, batch.tokens_per_req
        plan = self._fixed.get((size, width, num_passes))
        if plan is None:
            queries = CausalQueries.uniform(size, width, self._device)
            at = FixedLengths.empty(size, width, num_passes, 0, self._device)
            plan = self._fixed[size, width, num_passes] = _FixedPlan(at, queries, self._split_shape(size, width))
        return plan

    def _split_shape(self, size: int, width: int) -> SplitShape | None:
        """The kind of pass for split-KV attention; None for passes with more queries, such as short prompts."""
        shape = self._shape
        if width > shape.max_tokens_per_req or not supports(width, shape.num_q_heads, shape.num_kv_heads):
            return None
        config = shape.tuning.split_config(shape.head_dim, size)
        return SplitShape(size, width, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, self._num_sms, config)
