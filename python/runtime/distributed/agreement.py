"""The check that all ranks commit the same tokens, done on the device as part of an existing exchange."""

from __future__ import annotations

import torch

from runtime.distributed.parallel_group import ALONE, ParallelGroup

WORD_BITS = 32
HALF_BITS = 16
_MIX, _TOKEN, _PLACE = 0x2545F491, 0x5BD1E995, 0x1B873593
"""Odd constants without a pattern in their bits."""


class Agreement:
    """A 32-bit hash of all tokens and lengths that this rank committed, compared with the other ranks' in every decode step.

    The hash of a step is sent with the exchange of the next one: a rank whose tokens differ is found within one step.
    It covers all earlier steps, so no difference is lost. The host reads only `differs`.

    Attributes:
        differs: int32 [1] on the device; 1 from the first exchange on that found different hashes.
    """

    def __init__(self, device: torch.device, group: ParallelGroup = ALONE) -> None:
        self._group = group
        self._hash = torch.zeros(1, dtype=torch.int64, device=device)
        self.differs = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def active(self) -> bool:
        """Whether there is another rank to agree with."""
        return self._group.size > 1

    def words(self) -> torch.Tensor:
        """The hash as two float32 [2] of 16 bits each, which stay exact in sums with zeros. Inside a graph."""
        return torch.cat([self._hash >> HALF_BITS, self._hash & ((1 << HALF_BITS) - 1)]).to(torch.float32)

    @property
    def hashed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The hash, and the flag that is set if ranks differ, for kernels that compare."""
        return self._hash, self.differs

    def compare(self, words: torch.Tensor) -> None:
        """Compare the `words` of all ranks, float32 [size, 2]. Inside a graph."""
        self.differs.logical_or_((words != words[:1]).any())

    def commit(self, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Add the committed tokens of a step: int64 [B, D], of which the first `lens` int32 [B] of each row count."""
        if not self.active:
            return
        if self._group.fused is not None:
            self._group.fused.commit(self._hash, tokens, lens)
            return
        place = torch.arange(1, tokens.numel() + 1, device=tokens.device).view_as(tokens)
        kept = torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]
        mixed = _mixed((tokens + 1) * _TOKEN + place * _PLACE)
        total = torch.where(kept, mixed, 0).sum() + _mixed(lens.to(torch.int64) * _PLACE + place[:, 0]).sum()
        self._hash.copy_(_mixed(self._hash * _TOKEN + total))

    def reset(self) -> None:
        """Forget all tokens."""
        self._hash.zero_()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of int64 `x` in 0..2^32 - 1, entry by entry."""
    low = x & ((1 << WORD_BITS) - 1)
    low = (low ^ (low >> 15)) * _MIX & ((1 << WORD_BITS) - 1)
    return low ^ (low >> 13)
