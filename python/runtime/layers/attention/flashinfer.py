"""FlashInfer over the paged pool: its fa2 prefill kernels for every query count (Ye et al. 2025, arXiv:2501.01005)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from runtime.batch import Int32
from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.layers.attention.base import AttentionShape, AttentionSpec
from runtime.layers.attention.decode_metadata import FixedLengths, first_tail
from runtime.layers.attention.kernels.flashinfer_plan import PageLists, WorkItems, correct_plan, gather_pages
from runtime.layers.attention.kernels.tree_tail import TailKeys, merge_tree_tail
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable

PINNED_BUFFERS = 32
"""Plans whose upload may be under way at once: the host is at most a step ahead, and a step plans a pass a draft token and a few."""
EAGER_PLANS = 3
"""The same for prompts, by window: one on the device, one queued behind it, one being made."""
MIN_WORKSPACE = 96 << 20
LARGEST_TILE = 128
SMALLEST_TILE = 16
CTAS_PER_SM = 2
"""What FlashInfer's planner assumes when it splits keys."""
PLANNED_KEYS = 256
"""Plans are made for lengths rounded up to this and serve until one grows beyond. At batch 1 planning takes the host as long as two draft
passes take the GPU; half as many keys too many, on average, are a few work items that are switched off."""


@dataclass(slots=True)
class _Pass:
    """One pass of a plan, for one window: a wrapper and the tensors that its kernels read.

    Attributes:
        wrapper: FlashInfer's, in graph mode.
        workspace: what its planner uploads: work items, chunk size, output offsets.
        lists: the pages of each request.
        window: its sliding window, -1 for none.
        replan: plans again from host page offsets [B + 1]; None before the first plan.
        planned: int32 [B], the lengths that it is planned for, and its items; None before the first plan.
    """

    wrapper: BatchPrefillWithPagedKVCacheWrapper
    workspace: torch.Tensor
    lists: PageLists
    window: int
    replan: Callable[[torch.Tensor], WorkItems] | None = None
    planned: tuple[Int32, WorkItems] | None = None


@dataclass(frozen=True, slots=True)
class _FixedPlan:
    """Persistent metadata of fixed-width passes of one size: their lengths, and passes by (step, window)."""

    at: FixedLengths
    passes: dict[tuple[int, int], _Pass] = field(default_factory=dict)


class FlashInferAttention:
    """`AttentionBackend` of FlashInfer.

    Its planner runs on the host, from `seq_len_bounds` rounded up, which exceed the true lengths; before every pass of fixed width a kernel
    corrects what it wrote, from the lengths on the device (`plan_fixup.py`). So a plan serves many passes, and as it follows from bounds
    alone, a pass is cut the same way whichever passes came before it.

    A tree pass is full attention to the keys before the tail, then the tail under the mask (`tree_tail.py`).
    """

    caps = ATTENTION_CAPS["flashinfer"]

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        self._shape = shape
        self._pool = kv_pool
        self._table = page_table
        self._dtype = kv_pool.k[0].dtype
        self._device = kv_pool.k[0].device
        self._windows = shape.windows
        self._scale = shape.layers[0].scale
        self._num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        # Of the widest pass, from the start: wrappers keep theirs, and one made anew for a later pass would be a second.
        widest = (shape.max_batch_size, shape.max_tokens_per_req), (1, max(shape.max_prompt, LARGEST_TILE))
        self._workspace = torch.empty(max(self._partial_bytes(*one) for one in widest), dtype=torch.uint8, device=self._device)
        self._pinned = _PinnedRing(max(self._plan_bytes(*one) for one in widest), PINNED_BUFFERS)
        self._indices: dict[tuple[int, int], torch.Tensor] = {}
        self._fixed: dict[tuple[int, int, int, int], _FixedPlan] = {}
        self._eager = {window: BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2") for window in self._windows}
        own = next(iter(self._eager.values()))._pin_memory_int_workspace_buffer
        self._eager_pinned = _PinnedRing(own.numel(), EAGER_PLANS * len(self._windows))
        self._plan: _FixedPlan | None = None

    def prepare(self, batch: ForwardBatch, num_steps: int = 1) -> None:
        """Outside the graph: plan from the bounds on the host, correct it on the device in place. Never waits for the device's lengths."""
        if batch.tokens_per_req:
            self._plan = self._plan_fixed(batch, num_steps)
        else:
            self._plan = None
            self._plan_extend(batch)

    def plan_on_device(self, batch: ForwardBatch, num_steps: int = 1) -> None:
        """Nothing to do: the planner runs on the host."""

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Inside the graph. q [T, H, head_dim] -> [T, H * head_dim]."""
        kv, window, plan = (self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]), layer.window, self._plan
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan is None:
            self._eager[window].run(q, kv, out=out)
            return out.flatten(1)
        at = plan.at
        assert (batch.batch_size, batch.tokens_per_req) == (at.size, at.width), "forward of another batch than planned"
        if not at.tail:
            plan.passes[batch.step, window].wrapper.run(q, kv, out=out)
            return out.flatten(1)
        tail = at.tail + batch.step * at.width
        assert batch.tree_mask is not None, "forward of another batch than planned"
        assert batch.tree_tail == tail, "forward of another batch than planned"
        _, lse = plan.passes[0, window].wrapper.run(q, kv, out=out, return_lse=True)
        keys = TailKeys(self._table.pages, at.rows, at.seq_lens[batch.step], self._table.page_size, tail)
        return merge_tree_tail(q, *kv, keys, batch.tree_mask, layer.scale, out, lse, lse_in_bits=True).flatten(1)

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """None: FlashInfer's modules are compiled when they are first asked for, and kept on disk."""
        return []

    def _plan_extend(self, batch: ForwardBatch) -> None:
        """An eager pass: bounds are exact there, so the planner's own numbers hold."""
        shape, lens = self._shape, batch.seq_len_bounds
        kv_indptr = self._page_offsets(lens)
        total = int(kv_indptr[-1])
        indices = torch.empty(max(total, 1), dtype=torch.int32, device=self._device)
        scratch = torch.empty((2, batch.batch_size + 1), dtype=torch.int32, device=self._device)
        rows = batch.req_pool_indices.to(torch.int32)
        lists = PageLists(scratch[0], indices, scratch[1])
        gather_pages(rows, batch.seq_lens, self._table.pages, self._table.page_size, self._most_pages(lens), lists)
        assert batch.extend_lens is not None
        qo_indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(batch.extend_lens))).astype(np.int32))
        last_page_len = torch.from_numpy(((lens - 1) % self._table.page_size + 1).astype(np.int32))
        for window, wrapper in self._eager.items():
            # A wrapper stages every plan in one pinned buffer. The device may not have taken the plan before out of it: prompts are
            # planned a step ahead.
            wrapper._pin_memory_int_workspace_buffer, event = self._eager_pinned.take()
            wrapper.plan(
                qo_indptr, kv_indptr, indices[:total], last_page_len, shape.num_q_heads, shape.num_kv_heads, shape.head_dim,
                self._table.page_size, causal=True, sm_scale=self._scale, window_left=window, q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )  # fmt: skip
            event.record()

    def _plan_fixed(self, batch: ForwardBatch, num_steps: int) -> _FixedPlan:
        tail = first_tail(batch, self._windows, "flashinfer")
        key = (batch.batch_size, batch.tokens_per_req, num_steps, tail)
        plan = self._fixed.get(key)
        if plan is None:
            plan = self._fixed[key] = self._empty_plan(*key)
        plan.at.fill(batch)
        for (step, _), one in plan.passes.items():
            bounds = np.maximum(batch.seq_len_bounds - tail, 0) if tail else batch.seq_len_bounds + step * plan.at.width
            self._plan_pass(plan.at, step, one, bounds)
        return plan

    def _plan_pass(self, at: FixedLengths, step: int, one: _Pass, bounds: Int32) -> None:
        wanted = -(-bounds // PLANNED_KEYS) * PLANNED_KEYS
        if one.planned is None or not np.array_equal(one.planned[0], wanted):
            offsets = self._page_offsets(wanted)
            one.planned = wanted, self._first_plan(at, one, offsets) if one.replan is None else one.replan(offsets)
        correct_plan(
            at.rows, at.key_lens[step], self._table.pages, self._table.page_size, self._most_pages(bounds), one.lists, one.planned[1],
            at.width, one.window,
        )  # fmt: skip

    def _most_pages(self, bounds: Int32) -> int:
        return -(-int(bounds.max()) // self._table.page_size)

    def _first_plan(self, at: FixedLengths, one: _Pass, offsets: torch.Tensor) -> WorkItems:
        """Plan through the wrapper, which finds its module; later plans call the module alone and skip the wrapper's copies."""
        shape, B, width = self._shape, at.size, at.width
        wrapper, total = one.wrapper, min(int(offsets[-1]), one.lists.indices.numel())
        qo_indptr, causal = torch.arange(B + 1, dtype=torch.int32) * width, width > 1 and not at.tail
        wrapper.plan(
            qo_indptr, offsets, one.lists.indices[:total], torch.ones(B, dtype=torch.int32), shape.num_q_heads, shape.num_kv_heads,
            shape.head_dim, self._table.page_size, causal=causal, sm_scale=self._scale, window_left=one.window,
            q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip
        module, workspace = wrapper._cached_module, wrapper._float_workspace_buffer
        kv_lens = torch.ones(B, dtype=torch.int32)  # of the fa3 planner; fa2's reads the page offsets

        def replan(offsets: torch.Tensor) -> WorkItems:
            pinned, event = self._pinned.take()
            info = module.plan(
                workspace, one.workspace, pinned, qo_indptr, offsets, kv_lens, B * width, B, shape.num_q_heads, shape.num_kv_heads,
                self._table.page_size, True, shape.head_dim, shape.head_dim, causal, one.window, -1, False, 0,
            )  # fmt: skip
            event.record()
            wrapper._plan_info = info
            return WorkItems.of(list(info), pinned, one.workspace)

        one.replan = replan
        return replan(offsets)

    def _empty_plan(self, size: int, width: int, num_steps: int, tail: int) -> _FixedPlan:
        plan = _FixedPlan(FixedLengths.empty(size, width, num_steps, tail, self._device))
        for step in range(1 if tail else num_steps):
            for window in self._windows:
                plan.passes[step, window] = self._empty_pass(size, width, step, window)
        return plan

    def _empty_pass(self, B: int, width: int, step: int, window: int) -> _Pass:
        fits = self._plan_bytes(B, width) <= self._pinned.size and self._partial_bytes(B, width) <= self._workspace.numel()
        assert fits, "the pass is larger than the shape that the backend was built for"
        key = (step, width)
        if key not in self._indices:
            pages = (self._shape.max_batch_size if width <= self._shape.max_tokens_per_req else 1) * self._table.max_pages
            self._indices[key] = torch.zeros(pages, dtype=torch.int32, device=self._device)
        kv_indptr, last, qo = (torch.zeros(B + 1, dtype=torch.int32, device=self._device) for _ in range(3))
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_cuda_graph=True, backend="fa2", qo_indptr_buf=qo, paged_kv_indptr_buf=kv_indptr,
            paged_kv_indices_buf=self._indices[key], paged_kv_last_page_len_buf=last[:B],
        )  # fmt: skip
        # The wrapper's own are 8 MiB each, for every size; a plan of fixed width needs kilobytes.
        wrapper._int_workspace_buffer = torch.zeros(self._plan_bytes(B, width), dtype=torch.uint8, device=self._device)
        wrapper._pin_memory_int_workspace_buffer = torch.empty(wrapper._int_workspace_buffer.shape, dtype=torch.uint8, pin_memory=True)
        wrapper._kv_lens_buffer = torch.empty(B, dtype=torch.int32, device=self._device)
        return _Pass(wrapper, wrapper._int_workspace_buffer, PageLists(kv_indptr, self._indices[key], last[:B]), window)

    def _page_offsets(self, lens: Int32) -> torch.Tensor:
        """int32 [B + 1] on the host: where the pages of each request begin, if it has that many keys."""
        pages = -(-lens.astype(np.int64) // self._table.page_size)
        return torch.from_numpy(np.concatenate(([0], np.cumsum(pages))).astype(np.int32))

    def _items(self, size: int, width: int) -> int:
        """At least the work items that FlashInfer plans for a pass, whatever tile it takes."""
        group = self._shape.num_q_heads // self._shape.num_kv_heads
        return max(CTAS_PER_SM * self._num_sms // self._shape.num_kv_heads, -(-size * width * group // SMALLEST_TILE) + size) + 1

    def _plan_bytes(self, size: int, width: int) -> int:
        """At least the bytes of the planner's integers: three numbers and a flag an item, offsets by request and by query."""
        return -(-(16 * self._items(size, width) + 4 * (size + size * width) + 1024) // 4096) * 4096

    def _partial_bytes(self, size: int, width: int) -> int:
        """At least the bytes of partial results: a tile of float32 rows and their log-sum-exp for each item and query head."""
        shape, rows = self._shape, size * width
        group = shape.num_q_heads // shape.num_kv_heads
        # The planner takes the longest request that `rows` allows, and its tile from that.
        queries = (rows - size + 1) * group
        tile = SMALLEST_TILE if queries <= SMALLEST_TILE else 64 if queries <= 64 or shape.head_dim >= 256 else LARGEST_TILE
        items = max(CTAS_PER_SM * self._num_sms // shape.num_kv_heads, -(-rows * group // tile) + size) + 1
        return max(MIN_WORKSPACE, shape.num_q_heads * items * tile * (shape.head_dim + 1) * 4 + 4096)


class _PinnedRing:
    """Pinned staging buffers in turn: one is written again only after its last upload is done."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._events: list[torch.cuda.Event | None] = [None] * count
        self._next = 0

    def take(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A free buffer, and the event to record behind its upload."""
        turn, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[turn]
        if event is None:
            event = self._events[turn] = torch.cuda.Event()
        else:
            event.synchronize()
        return self._buffers[turn], event
