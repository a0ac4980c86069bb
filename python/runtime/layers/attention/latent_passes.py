"""The base of backends of latent attention: fixed-width passes, each by the fastest kernel for its size: our cluster kernel, our split-KV
kernels, or a library's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec
from runtime.layers.attention.decode_metadata import FixedLengths, first_tail
from runtime.layers.attention.kernels import latent_cluster
from runtime.layers.attention.kernels.latent_decode import (
    FEW_SPLITS,
    LatentShape,
    LatentWorkspace,
    latent_attention,
    latent_trial,
    trial_inputs,
)
from runtime.layers.attention.kernels.paged_keys import CausalQueries, PagedKeys
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.autotune import compile_all
from runtime.layers.kernels.pdl import starts_early
from runtime.mem_cache.kv_pool import KVPool, PageTable

TRIAL_LENGTH = 2048
"""Keys per request in timings."""
CLUSTER, SPLIT, OTHER = "cluster", "split", "other"
"""Our cluster kernel, our two split-KV kernels, and a library's kernel."""


CausalKernel = Callable[[torch.Tensor, torch.Tensor, PagedKeys, CausalQueries, float], torch.Tensor]
"""Causal attention by a library: (q [T, H, rank + rope], cache, keys, queries, scale) -> [T, H, rank]."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Persistent metadata of passes of one size; a captured graph reads these tensors.

    Attributes:
        at: lengths of the passes.
        queries: the queries of each pass.
        shape: the kind of pass.
        kernel: the name of the kernel that runs it.
    """

    at: FixedLengths
    queries: CausalQueries
    shape: LatentShape
    kernel: str


class LatentBackend(AttentionBackend):
    """Base of backends of models with latent attention: owner of the workspace and of the plans of fixed-width passes.

    The kernels for each size are timed when the first of these objects is created for a model; `AttentionShape.choices` stores the result.
    Tree passes use Triton's split-KV attention, whose mask covers the tail.
    """

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable, other: CausalKernel | None, name: str) -> None:
        """`other`: the library's kernel, called `name` in logs; None if it has none for fixed-width passes."""
        self._shape, self._pool, self._table, self._other, self._name = shape, kv_pool, page_table, other, name
        self._dtype, self._device = kv_pool.k[0].dtype, kv_pool.k[0].device
        self._num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._pdl = starts_early(self._device)
        self._plans: dict[tuple[int, int, int, int], _Plan] = {}
        self._plan: _Plan | None = None
        self._choose()
        sizes, widths = range(1, shape.max_batch_size + 1), range(1, shape.max_tokens_per_req + 1)
        self._workspace = LatentWorkspace([self._cut(size, width) for size in sizes for width in widths], self._device)

    @abstractmethod
    def _plan_ragged(self, batch: ForwardBatch) -> None:
        """On the host, plan a ragged pass."""

    @abstractmethod
    def _attend_ragged(self, q: torch.Tensor, layer: AttentionSpec) -> torch.Tensor:
        """Attend in the ragged pass that was planned. q [T, H, rank + rope] -> [T, H, rank]."""

    # ---- outside the graph

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Find the buffers of fixed-width passes, without a host read, or plan a ragged one."""
        if not batch.tokens_per_req:
            self._plan = None
            self._plan_ragged(batch)
            return
        key = (batch.batch_size, batch.tokens_per_req, num_passes, first_tail(batch, self._shape.windows, self._name))
        if key not in self._plans:
            self._plans[key] = self._empty_plan(*key)
        self._plan = self._plans[key]

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """One run per kernel of split-KV attention. Libraries' kernels are compiled already, or at their first use and cached on disk."""
        cuts = [self._cut(size, width) for size in sizes if tree or self._chosen(size, width) == SPLIT]
        return [partial(self._compile, cut, width, tree) for cut in _one_of_each_kernel(cuts)]

    def _compile(self, cut: LatentShape, length: int, tree: bool = False) -> None:
        latent_trial(cut, self._table.page_size, self._dtype, self._device, length, tree=tree, pdl=self._pdl)()

    # ---- inside or outside the graph

    def plan_on_device(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Compute lengths of fixed-width passes, in place."""
        if self._plan is not None:
            self._plan.at.fill(batch)

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, rank + rope] -> [T, H * rank]."""
        plan = self._plan
        return (self._attend_ragged(q, layer) if plan is None else self._attend(q, layer, batch, plan)).flatten(1)

    def _attend(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch, plan: _Plan) -> torch.Tensor:
        at, cache = plan.at, self._pool.k[layer.layer_id]
        assert (batch.batch_size, batch.tokens_per_req) == (at.size, at.width), "another batch was planned"
        keys = PagedKeys(self._table.pages, batch.page_rows, at.seq_lens(batch, batch.pass_index), self._table.page_size)
        if plan.kernel == OTHER:
            assert self._other is not None, "only existing kernels are chosen"
            return self._other(q, cache, keys, plan.queries, layer.scale)
        if plan.kernel == CLUSTER:
            return latent_cluster.latent_cluster_attention(q, cache, keys, plan.shape, layer.scale, pdl=self._pdl)
        tail = at.tail + batch.pass_index * at.width if at.tail else 0
        mask = batch.tree_mask if at.tail else None
        return latent_attention(q, cache, keys, plan.shape, self._workspace, layer.scale, tree_mask=mask, tail=tail, pdl=self._pdl)

    # ---- choice

    def _empty_plan(self, size: int, width: int, num_passes: int, tail: int) -> _Plan:
        queries = CausalQueries.uniform(size, width, self._device)
        at = FixedLengths.empty(size, width, num_passes, tail, self._device)
        return _Plan(at, queries, self._cut(size, width), SPLIT if tail else self._chosen(size, width))

    def _cut(self, size: int, width: int) -> LatentShape:
        layer = self._shape.layers[0]
        config = self._shape.tuning.latent_config(width * layer.num_q_heads)
        kv = layer.kv
        return LatentShape(size, width, layer.num_q_heads, kv.value_dim, kv.key_dim - kv.value_dim, self._num_sms, config)

    def _chosen(self, size: int, width: int) -> str:
        """The kernel for causal passes of this size: the one timed for the next larger size."""
        if width > self._shape.max_tokens_per_req:  # a short prompt
            return SPLIT if self._other is None else OTHER
        sizes, widths = self._timed()
        timed = _at_least(sizes, size), _at_least(widths, width)
        return self._shape.choices.fastest(self._key(*timed), {}) if len(self._kernels(*timed)) > 1 else SPLIT

    def _kernels(self, size: int, width: int) -> tuple[str, ...]:
        """The kernels that support causal passes of this size and smaller ones."""
        page_size, cache = self._table.page_size, self._pool.k[self._shape.layers[0].layer_id]
        clusters = latent_cluster.supports(self._cut(size, width), page_size, cache, pdl=self._pdl)
        return (*((CLUSTER,) if clusters else ()), SPLIT, *(() if self._other is None else (OTHER,)))

    def _timed(self) -> tuple[list[int], list[int]]:
        """Batch sizes and widths that are timed: powers of two, and the largest."""
        return list(_ladder(self._shape.max_batch_size)), sorted({1, self._shape.max_tokens_per_req})

    def _key(self, size: int, width: int) -> tuple[object, ...]:
        layer = self._shape.layers[0]
        return "latent", layer.num_q_heads, "heads", size, "x", width, "queries, pages of", self._table.page_size

    def _choose(self) -> None:
        """Compile and time the kernels that have no times yet."""
        sizes, widths = self._timed()
        several = [(size, width) for width in widths for size in sizes if len(self._kernels(size, width)) > 1]
        unknown = [one for one in several if not self._shape.choices.known(self._key(*one))]
        if unknown:
            cuts = _one_of_each_kernel([self._cut(*one) for one in unknown])
            compile_all([lambda _, cut=cut: self._compile(cut, cut.width) for cut in cuts])
        for size, width in unknown:
            self._shape.choices.fastest(self._key(size, width), self._trials(size, width))

    def _trials(self, size: int, width: int) -> dict[str, Callable[[], object]]:
        cut, length, pdl = self._cut(size, width), max(min(TRIAL_LENGTH, self._shape.max_context_len), width), self._pdl
        q, cache, keys = trial_inputs(cut, self._table.page_size, self._dtype, self._device, length)
        queries = CausalQueries.uniform(size, width, self._device)
        split = latent_trial(cut, self._table.page_size, self._dtype, self._device, length, pdl=pdl)
        runs: dict[str, Callable[[], object]] = {SPLIT: split}
        if CLUSTER in self._kernels(size, width):
            runs[CLUSTER] = lambda: latent_cluster.latent_cluster_attention(q, cache, keys, cut, 1.0, pdl=pdl)
        if (other := self._other) is not None:
            other(q, cache, keys, queries, 1.0)
            runs[OTHER] = lambda: other(q, cache, keys, queries, 1.0)
        return runs


def _one_of_each_kernel(cuts: Sequence[LatentShape]) -> list[LatentShape]:
    """One of `cuts` for each kernel to compile."""
    return list({(cut.config, cut.block_m, cut.splits > 1, cut.splits > FEW_SPLITS): cut for cut in cuts}.values())


def _ladder(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest


def _at_least(values: Sequence[int], wanted: int) -> int:
    return next((value for value in values if value >= wanted), values[-1])
