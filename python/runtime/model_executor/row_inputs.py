"""Copies row numbers, KV lengths and last tokens of a step's request rows into the persistent inputs."""

from __future__ import annotations

import torch

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
