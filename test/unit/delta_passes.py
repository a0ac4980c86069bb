"""Passes of linear attention over given positions of given requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch

Request = tuple[int, int, int]
"""A row, the position of its first token in the pass, and the number of its tokens."""


def pass_over(requests: Sequence[Request], window: int, device: torch.device) -> ForwardBatch:
    """A pass of fixed width if all requests have equally many tokens, at most `window`; otherwise a ragged one."""
    counts = [count for _, _, count in requests]
    uniform = len(set(counts)) == 1 and counts[0] <= window
    lens = np.array([start + count for _, start, count in requests], dtype=np.int32)
    total = torch.zeros(sum(counts), dtype=torch.int64, device=device)
    return ForwardBatch(
        mode=ForwardMode.DECODE if uniform else ForwardMode.EXTEND,
        batch_size=len(requests),
        tokens_per_req=counts[0] if uniform else 0,
        input_ids=total,
        positions=total,
        out_cache_loc=total,
        req_pool_indices=torch.tensor([row for row, _, _ in requests], device=device),
        seq_lens=torch.tensor(lens, device=device),
        qo_indptr=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device),
        seq_len_bounds=lens,
        extend_lens=None if uniform else np.array(counts, dtype=np.int32),
    )
