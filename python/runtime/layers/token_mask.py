"""The tokens that the grammars of a batch allow, as bits on the device."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch


def unpack(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The bits of int32 [..., ceil(V / 32)] as bool [..., V]; temporaries also take one byte per token."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    octets = bits.view(torch.uint8)[..., None].bitwise_right_shift(shifts).bitwise_and_(1)
    return octets.flatten(-2)[..., :vocab_size].view(torch.bool)


def forbid(logits: torch.Tensor, requests: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set float32 `logits` [B, W, V] of `requests`, int64 [n], to minus infinity where not `allowed`, bool [n, W, V]; in place."""
    if logits.is_cuda:
        logits[requests] = logits[requests].masked_fill_(~allowed, -torch.inf)
        return
    for windows, forbidden in zip(requests.tolist(), ~allowed, strict=True):  # in place, because a copy of the logits takes longer
        logits[windows].masked_fill_(forbidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Mask rows of the N constrained requests of a batch of B. Read only; rebuilt in each step.

    Attributes:
        bits: int32 [N, W, ceil(V / 32)]. Bit v % 32 of entry v // 32 is set if token v is allowed at a window position.
        index: int64 [B]. The row of `bits` of each request; 0 for unconstrained requests.
        requests: int64 [N], positions in the batch of the constrained requests, increasing.
        selected: the same positions on the host.
    """

    bits: torch.Tensor
    index: torch.Tensor
    requests: torch.Tensor
    selected: list[int]

    def allowed(self, requests: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """bool [n, W, V]: the allowed tokens of constrained requests, int64 [n]."""
        bits = self.bits[self.index[requests]]
        if bits.is_cuda:
            return unpack(bits, vocab_size)
        octets = bits.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").view(np.bool_))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of logits float32 [B' * W, V] of the first B' requests in which forbidden tokens have minus infinity."""
        W, V = self.bits.shape[1], logits.shape[1]
        masked = logits.clone()
        forbid(masked.view(-1, W, V), self.requests, self.allowed(self.requests, V))
        return masked

    def part(self, start: int, stop: int) -> TokenMask:
        """The mask of requests `start` to `stop`."""
        inside = slice(bisect_left(self.selected, start), bisect_left(self.selected, stop))
        selected = [request - start for request in self.selected[inside]]
        return TokenMask(self.bits, self.index[start:stop], self.requests[inside] - start, selected)
