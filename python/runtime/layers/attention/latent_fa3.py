"""FlashAttention 3 over latent rows: queries of 64 rotated columns and `qv` of 512, for any number of queries (Hopper)."""

from __future__ import annotations

import torch
from sgl_kernel.flash_attn import flash_attn_with_kvcache

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.layers.attention.base import AttentionShape, AttentionSpec
from runtime.layers.attention.kernels.paged_keys import CausalQueries, PagedKeys
from runtime.layers.attention.latent_passes import LatentBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable


class LatentFlashAttention(LatentBackend):
    """`AttentionBackend` "fa3" of models with latent attention.

    Fixed-width passes run our kernels or FA3, whichever was faster at their size; ragged passes run FA3, which reads the page table in
    place.
    """

    caps = ATTENTION_CAPS["fa3"]

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        super().__init__(shape, kv_pool, page_table, flash_latent, "fa3")
        self._extend: tuple[PagedKeys, CausalQueries] | None = None

    def _plan_ragged(self, batch: ForwardBatch) -> None:
        assert batch.extend_lens is not None, "a ragged pass"
        columns = min(max(-(-int(batch.seq_len_bounds.max()) // self._table.page_size), 1), self._table.max_pages)
        keys = PagedKeys(self._table.pages[:, :columns], batch.page_rows, batch.seq_lens, self._table.page_size)
        self._extend = keys, CausalQueries(batch.qo_indptr, int(batch.extend_lens.max()))

    def _attend_ragged(self, q: torch.Tensor, layer: AttentionSpec) -> torch.Tensor:
        assert self._extend is not None, "prepare comes before forward"
        return flash_latent(q, self._pool.k[layer.layer_id], *self._extend, layer.scale)


def flash_latent(q: torch.Tensor, cache: torch.Tensor, keys: PagedKeys, queries: CausalQueries, scale: float) -> torch.Tensor:
    """Causal attention by FA3: q [T, H, rank + rope] -> [T, H, rank]; keys and values are views of one cache."""
    rope = q.shape[2] - VALUE_DIM
    assert rope == KEY_DIM, "FA3 has kernels for 64 rotated and 512 other columns"
    return flash_attn_with_kvcache(
        q[..., VALUE_DIM:], cache[..., VALUE_DIM:], cache[..., :VALUE_DIM], qv=q[..., :VALUE_DIM], cache_seqlens=keys.seq_lens,
        page_table=keys.pages, cache_batch_idx=keys.rows, cu_seqlens_q=queries.cu_seqlens, max_seqlen_q=queries.most,
        softmax_scale=scale, causal=True, num_splits=0,
    )  # fmt: skip


VALUE_DIM, KEY_DIM = 512, 64
"""Columns of the latent, and of the rotated key."""
