"""The persistent inputs that graphs share, and the values of their padding.

They are allocated at their largest size. A captured graph holds their addresses, so they are written in place and never replaced. Runners
never run concurrently and each fills the inputs that it reads, so one set serves all decode, verify and draft passes. Graphs of short
prompts have another, with few request slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One persistent tensor [rows, *tail].

    Attributes:
        rows: whether it has a row per request or per token.
        pad: value of padding rows, with which every pass must be able to run.
    """

    name: str
    rows: Literal["req", "token"]
    dtype: torch.dtype
    tail: tuple[int, ...] = ()
    pad: int = 0

    def shape(self, requests: int, tokens: int) -> tuple[int, ...]:
        """Shape for passes of `requests` requests and `tokens` tokens."""
        return (tokens if self.rows == "token" else requests, *self.tail)

    def bytes(self, requests: int, tokens: int) -> int:
        """Bytes for passes of `requests` requests and `tokens` tokens."""
        return math.prod(self.shape(requests, tokens)) * self.dtype.itemsize


INPUTS = (
    BufferSpec("req_pool_indices", "req", torch.int64),
    BufferSpec("page_rows", "req", torch.int32),
    BufferSpec("kv_lens", "req", torch.int32),
    BufferSpec("last_tokens", "req", torch.int64),
    BufferSpec("seq_lens", "req", torch.int32),
    BufferSpec("shared_lens", "req", torch.int32),
    BufferSpec("input_ids", "token", torch.int64),
    BufferSpec("positions", "token", torch.int64),
    BufferSpec("out_cache_loc", "token", torch.int64),
    BufferSpec("tree_mask", "token", torch.int64, pad=1),
)


class InputBuffers:
    """Owner of the inputs. Returns `ForwardBatch`es that are views of them, the same object for the same shape.

    Attributes:
        max_requests, max_tokens: requests and tokens of the largest pass.
        tensors: every input by name, at its largest size.
        frozen: whether a captured graph holds addresses; inputs must not grow then.
    """

    def __init__(self, max_requests: int, *, max_tokens: int, device: torch.device) -> None:
        self.max_requests, self.max_tokens, self.device = max_requests, max_tokens, device
        self.frozen = False
        self._specs: dict[str, BufferSpec] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._batches: dict[tuple[ForwardMode, int, int, int, int, bool], ForwardBatch] = {}
        self._named: dict[tuple[str, int], torch.Tensor] = {}
        self._indptr = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self.declare(INPUTS, max_requests, max_tokens)

    def declare(self, specs: Sequence[BufferSpec], requests: int, tokens: int) -> None:
        """Add inputs, or enlarge existing ones, for passes of this size. Before any capture."""
        for spec in specs:
            shape, old = spec.shape(requests, tokens), self.tensors.get(spec.name)
            assert old is None or self._specs[spec.name] == spec, f"input {spec.name} is declared twice, differently"
            self._specs[spec.name] = spec
            if old is None or len(old) < shape[0]:
                assert not self.frozen, "a graph holds the address of the inputs"
                self.tensors[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=self.device)
                self._named.clear()

    def view(
        self, mode: ForwardMode, requests: int, tokens: int, tree_tail: int = 0, max_queries: int = 0, shared_prefix: bool = False
    ) -> ForwardBatch:
        """The batch of `requests` requests with `tokens` tokens in total; `tree_tail` > 0 adds the tree mask, `max_queries` > 0 makes it
        ragged, `shared_prefix` adds the length of a shared prefix.
        """
        key = (mode, requests, tokens, tree_tail, max_queries, shared_prefix)
        if key in self._batches:
            return self._batches[key]
        width = tokens // requests
        self._batches[key] = ForwardBatch(
            mode=mode,
            batch_size=requests,
            tokens_per_req=0 if max_queries else width,
            input_ids=self.named("input_ids", tokens),
            positions=self.named("positions", tokens),
            out_cache_loc=self.named("out_cache_loc", tokens),
            req_pool_indices=self.named("req_pool_indices", requests),
            seq_lens=self.named("seq_lens", requests),
            qo_indptr=(self._indptr[: requests + 1] * width).contiguous(),
            seq_len_bounds=np.full(requests, width, dtype=np.int32),
            extend_lens=np.full(requests, width, dtype=np.int32) if max_queries else None,
            max_queries=max_queries,
            tree_mask=self.named("tree_mask", tokens) if tree_tail else None,
            tree_tail=tree_tail,
            shared_lens=self.named("shared_lens", requests) if shared_prefix else None,
            page_rows=self.named("page_rows", requests),
        )
        return self._batches[key]

    def named(self, name: str, rows: int) -> torch.Tensor:
        """The first `rows` rows of an input: the same view each time, because creating views takes host time."""
        if (name, rows) not in self._named:
            self._named[name, rows] = self.tensors[name][:rows]
        return self._named[name, rows]

    def rows(self, size: int) -> torch.Tensor:
        """int64 [size]: request rows, `req_pool_indices` of every batch."""
        return self.named("req_pool_indices", size)

    def kv_lens(self, size: int) -> torch.Tensor:
        """int32 [size]: KV lengths before the pass."""
        return self.named("kv_lens", size)

    def last_tokens(self, size: int) -> torch.Tensor:
        """int64 [size]: the last committed token of each request."""
        return self.named("last_tokens", size)

    def reset(self, row_width: int) -> None:
        """Make every row a padding row of `row_width` tokens."""
        for name, tensor in self.tensors.items():
            tensor.fill_(self._specs[name].pad)
        self.tensors["seq_lens"].fill_(row_width)
