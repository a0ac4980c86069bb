"""Row numbers and lengths of fixed-width passes, in tensors whose addresses captured graphs hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.errors import ConfigError
from runtime.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Rows and lengths of the passes of one size that one plan prepares. Captured graphs read these tensors.

    Attributes:
        size, width: requests, and queries per request.
        tail: tree tail of the first pass; 0 for causal passes.
        rows: int32 [B], rows of the page table.
        seq_lens: int32 [steps, B], KV lengths of each pass.
        key_lens: int32 [steps, B], keys of the causal attention, or for trees the keys before the tail.
        steps: int32 [steps, 1], keys that each pass adds to `seq_lens` of the batch.
    """

    size: int
    width: int
    tail: int
    rows: torch.Tensor
    seq_lens: torch.Tensor
    key_lens: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def empty(cls, size: int, width: int, num_steps: int, tail: int, device: torch.device) -> FixedLengths:
        """Buffers of zeros."""

        def ints(*dims: int) -> torch.Tensor:
            return torch.zeros(dims, dtype=torch.int32, device=device)

        seq_lens = ints(num_steps, size)
        steps = (torch.arange(num_steps, dtype=torch.int32, device=device) * width)[:, None].contiguous()
        return cls(size, width, tail, ints(size), seq_lens, ints(num_steps, size) if tail else seq_lens, steps)

    def fill(self, batch: ForwardBatch) -> None:
        """Copy rows and lengths of a batch, in place and on the device. May be captured."""
        self.rows.copy_(batch.req_pool_indices)
        torch.add(batch.seq_lens, self.steps, out=self.seq_lens)
        if self.tail:
            # All passes of a tree share the keys before its tail.
            torch.sub(batch.seq_lens.expand_as(self.key_lens), self.tail, out=self.key_lens).clamp_(min=0)


def first_tail(batch: ForwardBatch, windows: Sequence[int], backend: str) -> int:
    """The tree tail of a batch's first pass; 0 for causal passes.

    Raises:
        ConfigError: the model has sliding windows; each branch of a tree would need its own window over the prefix.
    """
    if batch.tree_mask is None:
        return 0
    if tuple(windows) != (-1,):
        raise ConfigError(f"Draft trees need full attention in every layer with {backend}. Use --speculative-eagle-topk 1.")
    return batch.tree_tail
