"""KV lengths of fixed-width passes, in tensors with fixed addresses for captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.errors import ConfigError
from runtime.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Lengths of the passes of one size that are planned together. A single causal pass reads the lengths of its batch without a copy.

    Attributes:
        size, width: requests, and queries per request.
        tail: tree tail of the first pass; 0 for causal passes.
        steps: int32 [num_passes, 1], number of keys by which each pass exceeds the batch's `seq_lens`.
        lens: int32 [num_passes, B], KV lengths of each pass; None for a single causal pass.
        prefix: int32 [B], number of keys before the tail, equal for all passes of a tree; None for causal passes.
    """

    size: int
    width: int
    tail: int
    steps: torch.Tensor
    lens: torch.Tensor | None
    prefix: torch.Tensor | None

    @classmethod
    def empty(cls, size: int, width: int, num_passes: int, tail: int, device: torch.device) -> FixedLengths:
        """Buffers of zeros."""

        def ints(*dims: int) -> torch.Tensor:
            return torch.zeros(dims, dtype=torch.int32, device=device)

        steps = (torch.arange(num_passes, dtype=torch.int32, device=device) * width)[:, None].contiguous()
        lens = ints(num_passes, size) if tail or num_passes > 1 else None
        return cls(size, width, tail, steps, lens, ints(size) if tail else None)

    def fill(self, batch: ForwardBatch) -> None:
        """Compute lengths from those of a batch, in place on the device. Can be captured."""
        if self.lens is not None:
            torch.add(batch.seq_lens, self.steps, out=self.lens)
        if self.prefix is not None:
            torch.sub(batch.seq_lens, self.tail, out=self.prefix).clamp_(min=0)

    def seq_lens(self, batch: ForwardBatch, pass_index: int) -> torch.Tensor:
        """int32 [B]: KV lengths of one pass."""
        return batch.seq_lens if self.lens is None else self.lens[pass_index]

    def key_lens(self, batch: ForwardBatch, pass_index: int) -> torch.Tensor:
        """int32 [B]: number of keys of one pass's causal attention, or for trees of the keys before the tail."""
        return self.seq_lens(batch, pass_index) if self.prefix is None else self.prefix


def first_tail(batch: ForwardBatch, windows: Sequence[int], backend: str, softcap: float = 0.0) -> int:
    """The tree tail of a batch's first pass; 0 for causal passes.

    Raises:
        ConfigError: the model has sliding windows, and each branch of a tree would need its own window over the prefix; or its scores
            have a soft cap, which the kernel for the tail does not compute.
    """
    if batch.tree_mask is None:
        return 0
    if softcap:
        raise ConfigError(f"Draft trees are not possible with {backend} and a soft cap of scores. Use --speculative-eagle-topk 1.")
    if tuple(windows) != (-1,):
        raise ConfigError(f"Draft trees need full attention in every layer with {backend}. Use --speculative-eagle-topk 1.")
    return batch.tree_tail
