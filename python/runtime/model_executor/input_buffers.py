"""The persistent inputs that every graph shares, and what their padding holds.

Allocated once, at their largest. A captured graph holds their addresses, so they are written in place and never replaced. Runners never run
concurrently and each fills what it reads, so one set serves all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One persistent tensor: `rows` per request or per token, then `tail`."""

    name: str
    rows: Literal["req", "token"]
    dtype: torch.dtype
    pad: int  # what a padding row holds; must be safe to execute
    tail: tuple[int, ...] = ()

    def numel(self, requests: int, width: int) -> int:
        """Elements for `requests` requests of `width` tokens."""
        count = requests * (width if self.rows == "token" else 1)
        for size in self.tail:
            count *= size
        return count

    def bytes(self, requests: int, width: int) -> int:
        """Bytes for `requests` requests of `width` tokens."""
        return self.numel(requests, width) * self.dtype.itemsize

    def allocate(self, requests: int, width: int, device: torch.device) -> torch.Tensor:
        """A tensor of the largest size, holding `pad`."""
        rows = requests * (width if self.rows == "token" else 1)
        return torch.full((rows, *self.tail), self.pad, dtype=self.dtype, device=device)


INPUTS = (
    BufferSpec("req_pool_indices", "req", torch.int64, 0),
    BufferSpec("kv_lens", "req", torch.int32, 0),
    BufferSpec("seq_lens", "req", torch.int32, 1),
    BufferSpec("input_ids", "token", torch.int64, 0),
    BufferSpec("positions", "token", torch.int64, 0),
    BufferSpec("out_cache_loc", "token", torch.int64, 0),
    BufferSpec("tree_mask", "token", torch.int64, 1),
)


class InputBuffers:
    """Owner of the inputs; hands out `ForwardBatch`es that are views of them, the same object for the same shape.

    With `one_request`, a size counts the tokens of a single request, of which `max_requests` are the most.
    """

    def __init__(self, max_requests: int, max_width: int, device: torch.device, one_request: bool = False) -> None:
        self.max_requests, self.max_width, self.device = max_requests, max_width, device
        self._one_request = one_request
        self.tensors = {spec.name: spec.allocate(max_requests, max_width, device) for spec in INPUTS}
        self._indptr = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self._batches: dict[tuple[ForwardMode, int, int, int], ForwardBatch] = {}

    def view(self, mode: ForwardMode, size: int, width: int, tree_tail: int = 0) -> ForwardBatch:
        """The batch of `size` requests of `width` tokens; `tree_tail` > 0 gives it the tree mask."""
        key = (mode, size, width, tree_tail)
        if key not in self._batches:
            shape = (1, size * width) if self._one_request else (size, width)
            self._batches[key] = self._make(mode, *shape, tree_tail)
        return self._batches[key]

    def rows(self, size: int) -> torch.Tensor:
        """int64 [size]: request rows, `req_pool_indices` of every batch."""
        return self.tensors["req_pool_indices"][:size]

    def kv_lens(self, size: int) -> torch.Tensor:
        """int32 [size]: KV lengths before the pass."""
        return self.tensors["kv_lens"][:size]

    def reset(self) -> None:
        """Make every row a padding row."""
        for spec in INPUTS:
            self.tensors[spec.name].fill_(spec.pad)

    def poison(self) -> None:
        """Fill everything with values that no pass survives unnoticed; a test calls it between replays."""
        for tensor in self.tensors.values():
            tensor.fill_(-1)

    def _make(self, mode: ForwardMode, size: int, width: int, tree_tail: int) -> ForwardBatch:
        t, tokens = self.tensors, size * width
        return ForwardBatch(
            mode=mode,
            batch_size=size,
            tokens_per_req=width,
            input_ids=t["input_ids"][:tokens],
            positions=t["positions"][:tokens],
            out_cache_loc=t["out_cache_loc"][:tokens],
            req_pool_indices=t["req_pool_indices"][:size],
            seq_lens=t["seq_lens"][:size],
            qo_indptr=(self._indptr[: size + 1] * width).contiguous(),
            seq_len_bounds=np.full(size, width, dtype=np.int32),
            tree_mask=t["tree_mask"][:tokens] if tree_tail else None,
            tree_tail=tree_tail,
        )
