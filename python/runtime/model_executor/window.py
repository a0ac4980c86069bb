"""The inputs of a fixed-width pass, derived on the device from request rows: no host value travels but the row numbers."""

from __future__ import annotations

import torch

from runtime.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable


def fill_window(
    batch: ForwardBatch, page_table: PageTable, kv_lens: torch.Tensor, tokens: torch.Tensor, depths: torch.Tensor | None = None
) -> None:
    """Fill a persistent batch in place for `W = batch.tokens_per_req` tokens after each request's KV. Outside or inside a graph.

    Args:
        batch: its `req_pool_indices` are filled already, 0 where padded.
        page_table: where the slots come from.
        kv_lens: int32 [B]. KV length before the pass; 0 where padded.
        tokens: int64 [B, W].
        depths: int64 [B, W], the distance of each token from the first in the sequence (trees); None: 0, 1, 2, …
    """
    if kv_lens.is_cuda:
        from runtime.model_executor.window_kernel import fill_window_cuda

        fill_window_cuda(batch, page_table, kv_lens, tokens, depths)
        return
    width = batch.tokens_per_req
    steps = torch.arange(width, dtype=torch.int64, device=kv_lens.device)
    slots_at = kv_lens[:, None] + steps
    batch.input_ids.copy_(tokens.flatten())
    batch.positions.copy_((slots_at if depths is None else kv_lens[:, None] + depths).flatten())
    batch.out_cache_loc.copy_(page_table.slots(batch.req_pool_indices[:, None], slots_at).flatten())
    torch.add(kv_lens, width, out=batch.seq_lens)
