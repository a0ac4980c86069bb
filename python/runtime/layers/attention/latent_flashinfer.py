"""FlashInfer's MLA kernels over latent rows for ragged passes (Ye et al. 2025, arXiv:2501.01005), for GPUs without FA3."""

from __future__ import annotations

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from torch.nn import functional as F

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.layers.attention.base import AttentionShape, AttentionSpec
from runtime.layers.attention.flashinfer_adapter import check_version, offsets
from runtime.layers.attention.kernels.flashinfer_plan import PageLists, gather_pages
from runtime.layers.attention.latent_passes import LatentBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable

WORKSPACE_BYTES = 128 << 20
TILE_ROWS = 64
"""Rows of the kernel's tiles; a row is a query head of a token. If this is not a multiple of the number of heads, some heads of a token
whose key begins a block of keys miss that key: observed on an H200 with 20 and 24 heads, but not with 16 and 64."""


class LatentFlashInfer(LatentBackend):
    """`AttentionBackend` "flashinfer" of models with latent attention.

    Fixed-width passes run the cluster kernel or the split-KV kernels, whichever is faster at their size; neither needs a plan on the host,
    and both can be captured. Ragged passes are planned from their exact lengths.
    """

    caps = ATTENTION_CAPS["flashinfer"]

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        check_version()
        super().__init__(shape, kv_pool, page_table, None, "flashinfer")
        self._layer = shape.layers[0]
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=kv_pool.k[0].device)
        self._wrapper = BatchMLAPagedAttentionWrapper(workspace)
        self._heads = padded_heads(self._layer.num_q_heads)

    def _attend_ragged(self, q: torch.Tensor, layer: AttentionSpec) -> torch.Tensor:
        rank, cache, heads = layer.kv.value_dim, self._pool.k[layer.layer_id].squeeze(2), q.shape[1]
        q = F.pad(q, (0, 0, 0, self._heads - heads))
        return self._wrapper.run(q[..., :rank].contiguous(), q[..., rank:].contiguous(), cache[..., :rank], cache[..., rank:])[:, :heads]

    def _plan_ragged(self, batch: ForwardBatch) -> None:
        assert batch.extend_lens is not None, "a ragged pass"
        lens, page_size, device = batch.seq_len_bounds, self._table.page_size, self._table.pages.device
        counts = -(-lens.astype(np.int64) // page_size)
        indices = torch.empty(max(int(counts.sum()), 1), dtype=torch.int32, device=device)
        lists = PageLists(
            torch.empty(batch.batch_size + 1, dtype=torch.int32, device=device),
            indices,
            torch.empty(batch.batch_size, dtype=torch.int32, device=device),
        )
        gather_pages(batch.page_rows, batch.seq_lens, self._table.pages, page_size, int(counts.max()), lists)
        kv, layer, lengths = self._layer.kv, self._layer, torch.from_numpy(lens.astype(np.int32))
        self._wrapper.plan(
            offsets(batch.extend_lens), offsets(counts), indices, lengths, self._heads, kv.value_dim, kv.key_dim - kv.value_dim,
            page_size, True, layer.scale, kv.dtype, kv.dtype,
        )  # fmt: skip


def padded_heads(heads: int) -> int:
    """The number of heads to compute so that each tile has all heads of its tokens, or only heads of one token."""
    return 1 << (heads - 1).bit_length() if heads <= TILE_ROWS else -(-heads // TILE_ROWS) * TILE_ROWS
