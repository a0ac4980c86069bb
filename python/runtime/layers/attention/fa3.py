"""FlashAttention 3 over the paged pool (Shah et al. 2024, arXiv:2407.08608; Hopper, `sgl_kernel`) and split-KV attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec
from runtime.layers.attention.decode_metadata import FixedLengths, first_tail
from runtime.layers.attention.kernels import cluster_decode
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.shared_prefix import merge_prefix, split_pages
from runtime.layers.attention.kernels.split_decode import SplitWorkspace, split_attention, warm_up
from runtime.layers.attention.kernels.split_schedule import WorkSchedule
from runtime.layers.attention.kernels.split_shape import MAX_WIDTH, SplitShape, one_of_each_kernel, supports
from runtime.layers.attention.kernels.tree_tail import merge_tree_tail
from runtime.layers.attention.widened_prompts import PromptGroup, WidenedPrompts
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels.pdl import starts_early
from runtime.mem_cache.kv_pool import KVPool, PageTable


@dataclass(frozen=True, slots=True)
class _SharedPlan:
    """Persistent tensors of passes over a shared prefix.

    Attributes:
        own_pages: int32 [B, max_pages], the pages of each request after the prefix.
        own_rows: int32 [B], their rows in it.
        own_lens: int32 [B], the keys in them.
        cu_queries: int32 [2], the offsets of all queries, which are those of one request to the prefix.
    """

    own_pages: torch.Tensor
    own_rows: torch.Tensor
    own_lens: torch.Tensor
    cu_queries: torch.Tensor

    @classmethod
    def empty(cls, size: int, width: int, max_pages: int, device: torch.device) -> _SharedPlan:
        """For `size` requests of `width` queries."""
        rows = torch.arange(size, dtype=torch.int32, device=device)
        return cls(rows.new_zeros((size, max_pages)), rows, torch.zeros_like(rows), rows.new_tensor([0, size * width]))


@dataclass(frozen=True, slots=True)
class _FixedPlan:
    """Persistent metadata of fixed-width passes of one size; a captured graph reads these tensors.

    Attributes:
        at: lengths of the passes.
        cu_seqlens_q: int32 [B + 1]; for ragged windows filled before each pass.
        split: the kind of pass for split-KV attention, of a pass over a shared prefix to the keys after it; None if FA3 runs it.
        schedule: the split-KV schedule of the first pass, which all passes share; None if the split is static.
        shared: for passes over a shared prefix; else None.
        metadata: FA3's tile schedules, int32, by pass index, window and whether the layer is causal; of a shared prefix, not causal.
    """

    at: FixedLengths
    cu_seqlens_q: torch.Tensor
    split: SplitShape | None
    schedule: WorkSchedule | None
    shared: _SharedPlan | None = None
    metadata: dict[tuple[int, int, bool], torch.Tensor] = field(default_factory=dict)


class FlashAttention(AttentionBackend):
    """`AttentionBackend` of FA3.

    FA3 reads the page table in place, at the rows of the batch (`cache_batch_idx`), so planning only computes the tile schedule, once for
    all layers. Fixed-width passes for which `DeviceTuning.split_wins` holds run split-KV attention. A tree pass runs full attention to the
    keys before the tail, then attention to the tail under the mask, and merges both. A pass over a shared prefix attends with all queries
    to the prefix as if they were those of one request, then with those of each request to its own keys, and merges both.
    FA3 cannot read an 8-bit cache with 16-bit queries. With such a cache, all fixed-width passes run split-KV attention, and a ragged pass
    first converts the keys and values of its requests (`WidenedPrompts`).
    """

    caps = ATTENTION_CAPS["fa3"]

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        self._shape, self._pool, self._table = shape, kv_pool, page_table
        self._device, self._scaled = kv_pool.k[0].device, shape.layers[0].kv.scaled
        self._dtype = shape.dtype if self._scaled else kv_pool.k[0].dtype
        full = all(layer.window < 0 and layer.causal and layer.sinks is None for layer in shape.layers)
        self.caps = replace(ATTENTION_CAPS["fa3"], ragged_windows=not self._scaled, shared_prefix=full and not self._scaled)
        if self._scaled and not supports(shape.max_tokens_per_req, shape.num_q_heads, shape.num_kv_heads):
            raise ConfigError(
                f"--kv-cache-dtype fp8_e4m3 is not possible with {shape.max_tokens_per_req} draft tokens and {shape.num_q_heads} query "
                f"heads for {shape.num_kv_heads} KV heads. Lower --speculative-num-draft-tokens, or use auto."
            )
        self._fixed: dict[tuple[int, int, int, int, bool, bool], _FixedPlan] = {}
        self._plan: _FixedPlan | list[PromptGroup] | None = None
        self._num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._pdl = starts_early(self._device)
        self._workspace = self._split_workspace()
        self._widened = WidenedPrompts(kv_pool, page_table, self._dtype) if self._scaled else None
        # FA3 supports sinks only in bfloat16, in which published models store them.
        self._sinks = {layer.layer_id: None if layer.sinks is None else layer.sinks.to(torch.bfloat16) for layer in shape.layers}
        self._kinds = sorted({(layer.window, layer.causal) for layer in shape.layers})

    # ---- outside the graph

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Select the buffers of the passes. No host read."""
        self._plan = self._fixed_plan(batch, num_passes) if batch.tokens_per_req or batch.max_queries else self._groups(batch)

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """One run per kernel of split-KV attention and key conversion; FA3 is precompiled."""
        conversion: list[Callable[[], object]] = [] if self._widened is None else [self._widened.warm_up]
        return conversion + self._split_runs(sizes, width, tree=tree)

    def shared_warmup_runs(self, sizes: Sequence[int], width: int) -> list[Callable[[], object]]:
        """One run per kernel of split-KV attention to the keys after the prefix."""
        return self._split_runs(sizes, width, shared=True)

    def _split_runs(self, sizes: Sequence[int], width: int, tree: bool = False, shared: bool = False) -> list[Callable[[], object]]:
        shapes = [shape for size in sizes if (shape := self._split_shape(size, width, shared)) is not None]
        layers = {(-1 if tree else layer.window, layer.causal, layer.sinks is not None): layer for layer in self._shape.layers}
        return [
            partial(
                warm_up,
                shape,
                self._table.page_size,
                self._dtype,
                self._device,
                tree=tree,
                causal=causal,
                window=window,
                sinks=sinks,
                scaled=self._scaled,
                heads=layer.heads,
                shared=shared,
                pdl=self._pdl,
            )
            for shape in one_of_each_kernel(shapes)
            for (window, causal, sinks), layer in layers.items()
        ]

    # ---- inside or outside the graph

    def plan_on_device(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Compute lengths and the tile or split-KV schedules, in place."""
        plan = self._plan
        if isinstance(plan, list):
            self._plan_groups(plan)
            return
        assert plan is not None, "prepare comes before plan_on_device"
        plan.at.fill(batch)
        if plan.shared is not None:
            self._plan_shared(plan, plan.shared, batch)
            return
        if batch.max_queries:
            plan.cu_seqlens_q.copy_(batch.qo_indptr)
        if plan.split is None:
            for pass_index in range(1 if plan.at.tail else num_passes):
                for window, causal in self._kinds:
                    self._schedule(plan, batch, pass_index, window, causal and not plan.at.tail)
        else:
            plan.split.fill_schedule(plan.at.key_lens(batch, 0), plan.schedule)

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, head_dim] -> [T, H * head_dim]."""
        plan = self._plan
        assert plan is not None, "prepare comes before forward"
        if isinstance(plan, list):
            return self._extend(q, layer, plan).flatten(1)
        sizes = (plan.at.size, plan.at.width)
        assert (batch.batch_size, batch.tokens_per_req or batch.max_queries) == sizes, "another batch was planned"
        attend = self._tree if plan.at.tail else self._causal if plan.shared is None else self._shared
        return attend(q, layer, plan, batch).flatten(1)

    def forward_rows(self, qkv: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor | None:
        """Norm, rotate, store and attend in one kernel, for causal and full attention of few requests. [T, (H + 2 G) * D] -> [T, H * D]."""
        plan, page_size, k_cache = self._plan, self._table.page_size, self._pool.k[layer.layer_id]
        if not isinstance(plan, _FixedPlan) or plan.split is None or not plan.split.rotates or plan.at.tail or layer.heads is None:
            return None
        if not cluster_decode.takes_rows(layer.heads, plan.split, page_size, qkv, k_cache, layer.sinks):
            return None
        keys = PagedKeys(self._table.pages, batch.page_rows, plan.at.seq_lens(batch, batch.pass_index), page_size)
        return cluster_decode.cluster_attention(
            qkv, k_cache, self._pool.v[layer.layer_id], keys, plan.split, layer.scale, causal=layer.causal, window=layer.window,
            sinks=layer.sinks, new=cluster_decode.NewTokens(layer.heads, batch.positions, batch.out_cache_loc), pdl=self._pdl,
        ).flatten(1)  # fmt: skip

    # ---- planning

    def _groups(self, batch: ForwardBatch) -> list[PromptGroup]:
        """The groups of an eager ragged pass: one of all requests, with the columns of the page table in use, unless keys are converted."""
        assert batch.extend_lens is not None
        if self._widened is not None:
            requests = list(zip(batch.extend_lens.tolist(), batch.seq_len_bounds.tolist(), strict=True))
            return self._widened.groups(requests, batch.page_rows, batch.seq_lens, batch.qo_indptr)
        cols = -(-int(batch.seq_len_bounds.max()) // self._table.page_size)
        pages = self._table.pages[:, : min(max(cols, 1), self._table.max_pages)]
        keys = PagedKeys(pages, batch.page_rows, batch.seq_lens, self._table.page_size)
        return [PromptGroup(keys, pages, batch.qo_indptr, slice(None), int(batch.extend_lens.max()))]

    def _fixed_plan(self, batch: ForwardBatch, num_passes: int) -> _FixedPlan:
        width, tail = batch.tokens_per_req or batch.max_queries, first_tail(batch, self._shape.windows, "fa3")
        key = (batch.batch_size, width, num_passes, tail, batch.max_queries > 0, batch.shared_lens is not None)
        plan = self._fixed.get(key)
        if plan is None:
            plan = self._fixed[key] = self._empty_plan(*key)
        return plan

    def _empty_plan(self, size: int, width: int, num_passes: int, tail: int, ragged: bool, shared: bool) -> _FixedPlan:
        split = None if ragged else self._split_shape(size, width, shared)
        return _FixedPlan(
            at=FixedLengths.empty(size, width, num_passes, tail, self._device),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=self._device) * width,
            split=split,
            schedule=None if split is None else split.empty_schedule(self._device),
            shared=_SharedPlan.empty(size, width, self._table.max_pages, self._device) if shared else None,
        )

    def _split_shape(self, size: int, width: int, few_keys: bool = False) -> SplitShape | None:
        """The kind of pass for split-KV attention; None if FA3 runs the pass, for example a short prompt, which is wider than any
        window. With `few_keys`, requests have a few hundred.
        """
        shape = self._shape
        wins = self._scaled or few_keys or (width <= shape.max_tokens_per_req and shape.tuning.split_wins(size, width, shape.num_kv_heads))
        if not wins or not supports(width, shape.num_q_heads, shape.num_kv_heads):
            return None
        config = shape.tuning.split_config(shape.head_dim, size)
        return SplitShape(size, width, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, self._num_sms, config)

    def _split_workspace(self) -> SplitWorkspace | None:
        sizes, widths = self._shape.max_batch_size, min(self._shape.max_tokens_per_req, MAX_WIDTH)
        passes = [(size, width) for size in range(1, sizes + 1) for width in range(1, widths + 1)]
        shapes = [self._split_shape(*each, few_keys) for each in passes for few_keys in {False, self.caps.shared_prefix}]
        supported = [shape for shape in shapes if shape is not None]
        return SplitWorkspace(supported, self._device) if supported else None

    def _schedule(self, plan: _FixedPlan, batch: ForwardBatch, pass_index: int, window: int, causal: bool) -> None:
        """Compute one tile schedule into its static buffer."""
        at = plan.at
        fresh = self._tiles(self._table.pages, at.key_lens(batch, pass_index), plan.cu_seqlens_q, at.width, window, causal)
        _keep(plan.metadata, (pass_index, window, causal), fresh)

    def _plan_shared(self, plan: _FixedPlan, shared: _SharedPlan, batch: ForwardBatch) -> None:
        """Split the page table behind the prefix, and compute the tile schedules of both parts."""
        pages, shared_lens = self._table.pages, batch.shared_lens
        assert shared_lens is not None, "another batch was planned"
        split_pages(pages, batch.page_rows, batch.seq_lens, shared_lens, self._table.page_size, shared.own_pages, shared.own_lens)
        _keep(plan.metadata, (0, -1, False), self._tiles(pages, shared_lens[:1], shared.cu_queries, batch.num_tokens, -1, False))
        if plan.split is None:
            own = self._tiles(shared.own_pages, shared.own_lens, plan.cu_seqlens_q, plan.at.width, -1, True)
            _keep(plan.metadata, (0, -1, True), own)
        else:
            plan.split.fill_schedule(shared.own_lens, plan.schedule)

    def _plan_groups(self, groups: list[PromptGroup]) -> None:
        """Compute the tile schedules of a ragged pass once; otherwise each layer would compute them."""
        for kind in self._kinds:
            for group in groups:
                group.metadata[kind] = self._tiles(group.table, group.keys.seq_lens, group.cu_seqlens_q, group.max_queries, *kind)

    def _tiles(
        self, table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, max_queries: int, window: int, causal: bool
    ) -> torch.Tensor:
        """A tile schedule. Arguments must match those of `flash_attn_with_kvcache`."""
        shape = self._shape
        return get_scheduler_metadata(
            len(seq_lens), max_queries, table.shape[1] * self._table.page_size, shape.num_q_heads, shape.num_kv_heads,
            shape.head_dim, seq_lens, qkv_dtype=self._dtype, cu_seqlens_q=cu_seqlens_q, page_size=self._table.page_size,
            causal=causal, window_size=_window_size(window, causal), num_splits=0,
        )  # fmt: skip

    # ---- attention

    def _causal(self, q: torch.Tensor, layer: AttentionSpec, plan: _FixedPlan, batch: ForwardBatch) -> torch.Tensor:
        at = plan.at
        if plan.split is not None:
            keys = PagedKeys(self._table.pages, batch.page_rows, at.seq_lens(batch, batch.pass_index), self._table.page_size, plan.schedule)
            return self._split(q, layer, plan.split, keys, layer.causal, layer.window)
        return flash_attn_with_kvcache(
            q, self._pool.k[layer.layer_id], self._pool.v[layer.layer_id], cache_seqlens=at.seq_lens(batch, batch.pass_index),
            page_table=self._table.pages, cache_batch_idx=batch.page_rows, cu_seqlens_q=plan.cu_seqlens_q,
            max_seqlen_q=at.width, softmax_scale=layer.scale, causal=layer.causal, window_size=_window_size(layer.window, layer.causal),
            scheduler_metadata=plan.metadata[batch.pass_index, layer.window, layer.causal], num_splits=0, sinks=self._sinks[layer.layer_id],
        )  # fmt: skip

    def _shared(self, q: torch.Tensor, layer: AttentionSpec, plan: _FixedPlan, batch: ForwardBatch) -> torch.Tensor:
        k_cache, v_cache, shared, shared_lens = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id], plan.shared, batch.shared_lens
        assert shared is not None, "another batch was planned"
        assert shared_lens is not None, "another batch was planned"
        prefix_out, prefix_lse, *_ = flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=shared_lens[:1], page_table=self._table.pages, cache_batch_idx=batch.page_rows[:1],
            cu_seqlens_q=shared.cu_queries, max_seqlen_q=batch.num_tokens, softmax_scale=layer.scale, causal=False,
            scheduler_metadata=plan.metadata[0, -1, False], num_splits=0, return_softmax_lse=True,
        )  # fmt: skip
        if plan.split is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            keys = PagedKeys(shared.own_pages, shared.own_rows, shared.own_lens, self._table.page_size, plan.schedule)
            out = self._split(q, layer, plan.split, keys, lse=lse)
        else:
            out, lse, *_ = flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=shared.own_lens, page_table=shared.own_pages, cu_seqlens_q=plan.cu_seqlens_q,
                max_seqlen_q=plan.at.width, softmax_scale=layer.scale, causal=True, window_size=_window_size(-1, True),
                scheduler_metadata=plan.metadata[0, -1, True], num_splits=0, return_softmax_lse=True,
            )  # fmt: skip
            lse = lse.transpose(0, 1)
        in_bits = plan.split is not None
        return merge_prefix(out, lse, prefix_out, prefix_lse.transpose(0, 1), shared.own_lens, shared_lens, lse_in_bits=in_bits)

    def _tree(self, q: torch.Tensor, layer: AttentionSpec, plan: _FixedPlan, batch: ForwardBatch) -> torch.Tensor:
        at = plan.at
        tail = at.tail + batch.pass_index * at.width
        assert batch.tree_mask is not None, "another batch was planned"
        assert batch.tree_tail == tail, "another batch was planned"
        k_cache, v_cache = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        if plan.split is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            before = PagedKeys(self._table.pages, batch.page_rows, at.key_lens(batch, 0), self._table.page_size, plan.schedule)
            out = self._split(q, layer, plan.split, before, causal=False, lse=lse)
        else:
            out, lse, *_ = flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=at.key_lens(batch, 0), page_table=self._table.pages,
                cache_batch_idx=batch.page_rows, cu_seqlens_q=plan.cu_seqlens_q, max_seqlen_q=at.width,
                softmax_scale=layer.scale, causal=False, scheduler_metadata=plan.metadata[0, -1, False], num_splits=0,
                return_softmax_lse=True,
            )  # fmt: skip
            lse = lse.transpose(0, 1)
        keys = PagedKeys(self._table.pages, batch.page_rows, at.seq_lens(batch, batch.pass_index), self._table.page_size)
        in_bits = plan.split is not None
        return merge_tree_tail(
            q, k_cache, v_cache, keys, tail, batch.tree_mask, layer.scale, out, lse, lse_in_bits=in_bits, sinks=layer.sinks,
            kv_scales=layer.kv_scales,
        )  # fmt: skip

    def _split(
        self,
        q: torch.Tensor,
        layer: AttentionSpec,
        shape: SplitShape,
        keys: PagedKeys,
        causal: bool = True,
        window: int = -1,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Split-KV attention; with `lse`, without sinks."""
        assert self._workspace is not None, "the pass is larger than the shape that the backend was built for"
        return split_attention(
            q.contiguous(), self._pool.k[layer.layer_id], self._pool.v[layer.layer_id], keys, shape, self._workspace, layer.scale,
            causal=causal, window=window, sinks=layer.sinks if lse is None else None, lse=lse, kv_scales=layer.kv_scales, pdl=self._pdl,
        )  # fmt: skip

    def _extend(self, q: torch.Tensor, layer: AttentionSpec, groups: list[PromptGroup]) -> torch.Tensor:
        outs = []
        for group in groups:
            k, v, rows = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id], group.keys.rows
            if self._widened is not None:
                k, v, rows = *self._widened.widen(group, layer), None
            outs.append(
                flash_attn_with_kvcache(
                    q[group.queries], k, v, cache_seqlens=group.keys.seq_lens, page_table=group.table, cache_batch_idx=rows,
                    cu_seqlens_q=group.cu_seqlens_q, max_seqlen_q=group.max_queries, softmax_scale=layer.scale, causal=layer.causal,
                    window_size=_window_size(layer.window, layer.causal), scheduler_metadata=group.metadata[layer.window, layer.causal],
                    num_splits=0, sinks=self._sinks[layer.layer_id],
                )
            )  # fmt: skip
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _keep(metadata: dict[tuple[int, int, bool], torch.Tensor], key: tuple[int, int, bool], fresh: torch.Tensor) -> None:
    """Store a tile schedule at its fixed address."""
    if key in metadata:
        metadata[key].copy_(fresh)
    else:
        metadata[key] = fresh


def _window_size(window: int, causal: bool) -> tuple[int, int]:
    """FA3's (left, right) window; -1 means no limit."""
    return (window, 0) if window >= 0 and causal else (window, -1)
