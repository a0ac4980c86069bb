"""The inputs of a fixed-width pass, derived on the device from request rows: `load_rows`, then `fill_window`. Only row numbers come from
the host."""

from __future__ import annotations

import numpy as np
import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.request_rows import RequestRows


def load_rows(inputs: InputBuffers, rows: torch.Tensor, state: RequestRows) -> None:
    """Fill `rows`, `page_rows`, `kv_lens` and `last_tokens` of the inputs for request rows int64 [B]; padding: row 0.

    Outside or inside a graph.
    """
    if rows.is_cuda:
        from runtime.model_executor.window_kernel import load_rows_cuda

        load_rows_cuda(inputs, rows, state)
        return
    size = len(rows)
    inputs.rows(size).copy_(rows)
    inputs.named("page_rows", size).copy_(rows)
    torch.index_select(state.kv_lens, 0, rows, out=inputs.kv_lens(size))
    torch.index_select(state.last_tokens, 0, rows, out=inputs.last_tokens(size))


def fill_window(
    batch: ForwardBatch,
    page_table: PageTable,
    kv_lens: torch.Tensor,
    tokens: torch.Tensor,
    depths: torch.Tensor | None = None,
    ahead: int = 0,
) -> None:
    """Fill a batch in place with `W = batch.tokens_per_req` tokens after each request's KV. Outside or inside a graph.

    Args:
        batch: persistent buffers; `req_pool_indices` is filled already, 0 for padding.
        page_table: gives the slots.
        kv_lens: int32 [B]. KV length before the pass; 0 for padding.
        tokens: int64 [B, W].
        depths: int64 [B, W], the distance of each token from the first in the sequence (trees); None: 0, 1, 2, …
        ahead: KV positions that earlier passes wrote after `kv_lens`.
    """
    if kv_lens.is_cuda:
        from runtime.model_executor.window_kernel import fill_window_cuda

        fill_window_cuda(batch, page_table, kv_lens, tokens, depths, ahead)
        return
    width = batch.tokens_per_req
    first = kv_lens[:, None] + ahead
    slots_at = first + torch.arange(width, dtype=torch.int64, device=kv_lens.device)
    batch.input_ids.copy_(tokens.flatten())
    batch.positions.copy_((slots_at if depths is None else first + depths).flatten())
    batch.out_cache_loc.copy_(page_table.slots(batch.req_pool_indices[:, None], slots_at).flatten())
    torch.add(kv_lens, ahead + width, out=batch.seq_lens)


def prompts_and_windows(prompts: ForwardBatch, windows: ForwardBatch, count: int) -> ForwardBatch:
    """One EXTEND batch: the tokens of `prompts`, then the first `count` windows of `windows`. Outside any graph.

    Decoding is bound by reading the weights, which the pass over the prompts reads anyway (Agrawal et al. 2024, arXiv:2403.02310).
    """
    assert prompts.extend_lens is not None
    width, T = windows.tokens_per_req, prompts.num_tokens
    tokens = count * width
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        batch_size=prompts.batch_size + count,
        tokens_per_req=0,
        input_ids=torch.cat([prompts.input_ids, windows.input_ids[:tokens]]),
        positions=torch.cat([prompts.positions, windows.positions[:tokens]]),
        out_cache_loc=torch.cat([prompts.out_cache_loc, windows.out_cache_loc[:tokens]]),
        req_pool_indices=torch.cat([prompts.req_pool_indices, windows.req_pool_indices[:count]]),
        seq_lens=torch.cat([prompts.seq_lens, windows.seq_lens[:count]]),
        qo_indptr=torch.cat([prompts.qo_indptr, windows.qo_indptr[1 : count + 1] + T]),
        seq_len_bounds=np.concatenate([prompts.seq_len_bounds, windows.seq_len_bounds[:count]]),
        extend_lens=np.concatenate([prompts.extend_lens, np.full(count, width, dtype=np.int32)]),
    )
