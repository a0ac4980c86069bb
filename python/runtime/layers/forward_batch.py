"""The device inputs of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import ForwardMode


@dataclass(slots=True)
class ForwardBatch:
    """B requests, T tokens. A worker makes one per pass; a captured graph has one over persistent buffers.

    `seq_lens` is always the KV length after this pass has written. Query `i` of `q = tokens_per_req` sees `seq_len - q + i + 1` keys; in a
    ragged pass the same holds with each request's own query count.

    Attributes:
        mode: the forward mode.
        batch_size: B, including padding.
        tokens_per_req: queries of every request; 0 in ragged passes, where they differ.
        input_ids: int64 [T].
        positions: int64 [T].
        out_cache_loc: int64 [T]. KV slot that each token writes, page * page_size + position % page_size; padding: 0.
        req_pool_indices: int64 [B]. Row of the page table; padding: 0.
        seq_lens: int32 [B], on the device.
        qo_indptr: int32 [B + 1], on the device: offsets of each request's queries.
        seq_len_bounds: int32 [B], on the host, upper bounds of `seq_lens`; exact for prompts and if no step is in flight.
        extend_lens: int32 [B], on the host, ragged passes only: the queries of each request.
        max_queries: maximum queries of a request in a capturable ragged pass, in which a request may also have none; 0 in all other passes.
        pass_index: index of the pass in a plan of several passes (draft decode: 0..K-2).
        tree_mask: int64 [T], or None for a causal pass. If bit t is set, the query sees the t-th of the last
            `tree_tail` keys of its request. Every query sees all earlier keys.
        tree_tail: number of keys at the end of each request that `tree_mask` covers, at most 64.
        hidden_states: [T, H_in], draft passes only: a hidden state of the target, or of the draft itself, per token.
        shared_lens: int32 [B], all equal, on the device, or None: the keys at the front of all requests that lie in the same pages, a
            multiple of the page size. The pass attends to them once for all requests (cascade attention).
        page_rows: int32 [B], `req_pool_indices` in the dtype that attention kernels read; computed if not given.
    """

    mode: ForwardMode
    batch_size: int
    tokens_per_req: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    seq_len_bounds: npt.NDArray[np.int32]
    extend_lens: npt.NDArray[np.int32] | None = None
    max_queries: int = 0
    pass_index: int = 0
    tree_mask: torch.Tensor | None = None
    tree_tail: int = 0
    hidden_states: torch.Tensor | None = None
    shared_lens: torch.Tensor | None = None
    page_rows: torch.Tensor = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        if self.page_rows is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.page_rows = self.req_pool_indices.to(torch.int32)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[0]

    def set_rows(self, rows: torch.Tensor) -> None:
        """Set the rows of the first requests in place, integers [n] with n <= B; the others become padding."""
        for own in (self.req_pool_indices, self.page_rows):
            own[: len(rows)].copy_(rows)
            if len(rows) < self.batch_size:
                own[len(rows) :].zero_()


def decode_batch(rows: torch.Tensor, width: int, length: int) -> ForwardBatch:
    """A batch for timing: one request for each of `rows`, int64 [B], with `length` tokens, of which the last `width` are in the pass. Token
    ids and slots are 0.
    """
    size, device = len(rows), rows.device
    lens = np.full(size, length, dtype=np.int32)
    ids, slots = torch.zeros((2, size * width), dtype=torch.int64, device=device)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        batch_size=size,
        tokens_per_req=width,
        input_ids=ids,
        positions=(torch.arange(width, device=device) + length - width).repeat(size),
        out_cache_loc=slots,
        req_pool_indices=rows,
        seq_lens=torch.tensor(lens, device=device),
        qo_indptr=torch.arange(size + 1, dtype=torch.int32, device=device) * width,
        seq_len_bounds=lens,
    )
