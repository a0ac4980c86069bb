"""FlashInfer over the paged pool: its fa2 prefill kernels for any number of queries (Ye et al. 2025, arXiv:2501.01005)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.batch import Int32
from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec
from runtime.layers.attention.decode_metadata import FixedLengths, first_tail
from runtime.layers.attention.flashinfer_adapter import EagerPrefill, FixedPrefill, PrefillLayout, check_version, offsets
from runtime.layers.attention.kernels.flashinfer_plan import PageLists, WorkItems, gather_pages, trim_plan
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.tree_tail import merge_tree_tail
from runtime.layers.attention.pinned_ring import PinnedRing
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable

PINNED_BUFFERS = 32
"""Maximum plans in flight: the host is at most one step ahead, and a step plans a few passes and one per draft."""
EAGER_PLANS = 3
"""Maximum plans of prompts in flight, per window: one on the device, one queued, one being filled."""
MIN_WORKSPACE = 96 << 20
LARGEST_TILE = 128
SMALLEST_TILE = 16
CTAS_PER_SM = 2
"""The number that FlashInfer's planner assumes when it splits keys."""
PLANNED_KEYS = 256
"""For planning, lengths are rounded up to a multiple of this, and a plan is valid until one length exceeds it. At batch size 1 planning
takes the host as long as two draft passes take the GPU. The excess keys, half of this number on average, are a few disabled work items."""


@dataclass(slots=True)
class _Pass:
    """One pass of a plan, for one window.

    Attributes:
        prefill: FlashInfer's kernels and the tensors they read.
        planned: int32 [B], the lengths for which it is planned, and the work items; None before the first plan.
    """

    prefill: FixedPrefill
    planned: tuple[Int32, WorkItems] | None = None


@dataclass(frozen=True, slots=True)
class _FixedPlan:
    """Persistent metadata of fixed-width passes of one size: their lengths, and passes by (pass index, window)."""

    at: FixedLengths
    passes: dict[tuple[int, int], _Pass] = field(default_factory=dict)


class FlashInferAttention(AttentionBackend):
    """`AttentionBackend` of FlashInfer.

    The planner runs on the host, with `seq_len_bounds` rounded up, which exceed the true lengths. Before every fixed-width pass a kernel
    trims the plan to the lengths on the device, so one plan serves many passes. A plan depends only on the bounds, so a pass is split in
    the same way regardless of earlier passes.
    A tree pass runs full attention to the keys before the tail, then attention to the tail under the mask, and merges both. FlashInfer
    compiles its modules at their first use and caches them on disk.
    """

    caps = ATTENTION_CAPS["flashinfer"]

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        check_version()
        self._shape, self._pool, self._table = shape, kv_pool, page_table
        self._device = kv_pool.k[0].device
        self._num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._layout = PrefillLayout(
            shape.num_q_heads, shape.num_kv_heads, shape.head_dim, page_table.page_size, shape.layers[0].scale, shape.layers[0].softcap,
            kv_pool.k[0].dtype,
        )  # fmt: skip
        # Allocated for the widest pass at once: wrappers keep a reference, so a larger one later would exist in addition.
        widest = (shape.max_batch_size, shape.max_tokens_per_req), (1, max(shape.max_prompt, LARGEST_TILE))
        partial_bytes = max(self._partial_bytes(*size) for size in widest)
        self._workspace = torch.empty(partial_bytes, dtype=torch.uint8, device=self._device)
        self._pinned = PinnedRing(max(self._plan_bytes(*size) for size in widest), PINNED_BUFFERS)
        self._indices: dict[tuple[int, int], torch.Tensor] = {}
        self._fixed: dict[tuple[int, int, int, int], _FixedPlan] = {}
        self._eager = {window: EagerPrefill(self._layout, self._workspace, window) for window in shape.windows}
        eager_bytes = next(iter(self._eager.values())).plan_bytes
        self._eager_pinned = PinnedRing(eager_bytes, EAGER_PLANS * len(self._eager))
        self._plan: _FixedPlan | None = None

    # ---- outside the graph

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Plan from the bounds on the host and trim the plan on the device, in place. Never waits for the device."""
        if batch.tokens_per_req:
            self._plan = self._plan_fixed(batch, num_passes)
        else:
            self._plan = None
            self._plan_extend(batch)

    # ---- inside the graph

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, head_dim] -> [T, H * head_dim]."""
        kv, plan = (self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]), self._plan
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan is None:
            self._eager[layer.window].run(q, kv, out)
            return out.flatten(1)
        at = plan.at
        assert (batch.batch_size, batch.tokens_per_req) == (at.size, at.width), "another batch was planned"
        if not at.tail:
            plan.passes[batch.pass_index, layer.window].prefill.run(q, kv, out)
            return out.flatten(1)
        tail = at.tail + batch.pass_index * at.width
        assert batch.tree_mask is not None, "another batch was planned"
        assert batch.tree_tail == tail, "another batch was planned"
        lse = plan.passes[0, layer.window].prefill.run_with_lse(q, kv, out)
        keys = PagedKeys(self._table.pages, batch.page_rows, at.seq_lens(batch, batch.pass_index), self._table.page_size)
        return merge_tree_tail(q, *kv, keys, tail, batch.tree_mask, layer.scale, out, lse, lse_in_bits=True).flatten(1)

    # ---- planning

    def _plan_extend(self, batch: ForwardBatch) -> None:
        """Plan an eager pass, where bounds are exact, so the plan needs no trimming."""
        lens, page_size = batch.seq_len_bounds, self._table.page_size
        kv_indptr = self._page_offsets(lens)
        total = int(kv_indptr[-1])
        indices = torch.empty(max(total, 1), dtype=torch.int32, device=self._device)
        scratch = torch.empty((2, batch.batch_size + 1), dtype=torch.int32, device=self._device)
        lists = PageLists(scratch[0], indices, scratch[1])
        gather_pages(batch.page_rows, batch.seq_lens, self._table.pages, page_size, self._max_pages(lens), lists)
        assert batch.extend_lens is not None
        qo_indptr = offsets(batch.extend_lens)
        last_page_len = torch.from_numpy(((lens - 1) % page_size + 1).astype(np.int32))
        for prefill in self._eager.values():
            prefill.plan(qo_indptr, kv_indptr, indices[:total], last_page_len, self._eager_pinned)

    def _plan_fixed(self, batch: ForwardBatch, num_passes: int) -> _FixedPlan:
        tail = first_tail(batch, self._shape.windows, "flashinfer", self._layout.softcap)
        key = (batch.batch_size, batch.tokens_per_req, num_passes, tail)
        plan = self._fixed.get(key)
        if plan is None:
            plan = self._fixed[key] = self._empty_plan(*key)
        plan.at.fill(batch)
        for (pass_index, _), one in plan.passes.items():
            bounds = np.maximum(batch.seq_len_bounds - tail, 0) if tail else batch.seq_len_bounds + pass_index * plan.at.width
            self._plan_pass(plan.at, batch, pass_index, one, bounds)
        return plan

    def _plan_pass(self, at: FixedLengths, batch: ForwardBatch, pass_index: int, one: _Pass, bounds: Int32) -> None:
        wanted = -(-bounds // PLANNED_KEYS) * PLANNED_KEYS
        if one.planned is None or not np.array_equal(one.planned[0], wanted):
            one.planned = wanted, one.prefill.plan(self._page_offsets(wanted), self._pinned)
        trim_plan(
            batch.page_rows, at.key_lens(batch, pass_index), self._table.pages, self._table.page_size, self._max_pages(bounds),
            one.prefill.lists, one.planned[1], at.width, one.prefill.window,
        )  # fmt: skip

    def _empty_plan(self, size: int, width: int, num_passes: int, tail: int) -> _FixedPlan:
        plan = _FixedPlan(FixedLengths.empty(size, width, num_passes, tail, self._device))
        for pass_index in range(1 if tail else num_passes):
            for window in self._shape.windows:
                plan.passes[pass_index, window] = _Pass(self._empty_pass(size, width, pass_index, width > 1 and not tail, window))
        return plan

    def _empty_pass(self, B: int, width: int, pass_index: int, causal: bool, window: int) -> FixedPrefill:
        plan_bytes = self._plan_bytes(B, width)
        fits = plan_bytes <= self._pinned.size and self._partial_bytes(B, width) <= self._workspace.numel()
        assert fits, "the pass is larger than the shape for which the backend was built"
        key = (pass_index, width)
        if key not in self._indices:
            pages = (self._shape.max_batch_size if width <= self._shape.max_tokens_per_req else 1) * self._table.max_pages
            self._indices[key] = torch.zeros(pages, dtype=torch.int32, device=self._device)
        indptr, last = (torch.zeros(count, dtype=torch.int32, device=self._device) for count in (B + 1, B))
        lists = PageLists(indptr, self._indices[key], last)
        return FixedPrefill(self._layout, self._workspace, lists, width, causal, window, plan_bytes)

    def _page_offsets(self, lens: Int32) -> torch.Tensor:
        """int32 [B + 1] on the host: offsets of each request's pages if it has `lens` keys."""
        return offsets(-(-lens.astype(np.int64) // self._table.page_size))

    def _max_pages(self, bounds: Int32) -> int:
        return -(-int(bounds.max()) // self._table.page_size)

    # ---- upper bounds of the planner's inputs

    def _items(self, size: int, width: int, tile: int) -> int:
        """Work items of a pass with this tile."""
        group = self._shape.num_q_heads // self._shape.num_kv_heads
        return max(CTAS_PER_SM * self._num_sms // self._shape.num_kv_heads, -(-size * width * group // tile) + size) + 1

    def _plan_bytes(self, size: int, width: int) -> int:
        """Bytes of the planner's integers: three numbers and a flag per item, offsets per request and per query."""
        items = self._items(size, width, SMALLEST_TILE)
        return -(-(16 * items + 4 * (size + size * width) + 1024) // 4096) * 4096

    def _partial_bytes(self, size: int, width: int) -> int:
        """Bytes of partial results: a tile of float32 rows and their log-sum-exp per item and query head."""
        shape = self._shape
        # The planner derives its tile from the longest request that the rows allow.
        queries = (size * width - size + 1) * (shape.num_q_heads // shape.num_kv_heads)
        tile = SMALLEST_TILE if queries <= SMALLEST_TILE else 64 if queries <= 64 or shape.head_dim >= 256 else LARGEST_TILE
        items = self._items(size, width, tile)
        return max(MIN_WORKSPACE, shape.num_q_heads * items * tile * (shape.head_dim + 1) * 4 + 4096)
