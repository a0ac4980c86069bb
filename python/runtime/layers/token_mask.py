"""Which tokens the grammars of a batch allow, as bits on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Mask rows of the N constrained requests of a batch of B. Read only; made anew in each step.

    Attributes:
        bits: int32 [N, W, ceil(V / 32)]. Bit v % 32 of entry v // 32 says whether token v is allowed at a window position.
        index: int64 [B]. The row of `bits` that belongs to each request; 0 for requests that are not constrained.
        selected: positions in the batch of the constrained requests, on the host, rising.
    """

    bits: torch.Tensor
    index: torch.Tensor
    selected: list[int]

    def allowed(self, requests: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """bool [n, W, V] of constrained requests, int64 [n]."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.bits.device)
        bits = (self.bits[self.index[requests]][..., None] >> shifts) & 1
        return bits.flatten(-2)[..., :vocab_size].bool()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy of float32 [B' * W, V], the first requests of the batch, in which forbidden tokens have minus infinity."""
        W, V = self.bits.shape[1], logits.shape[1]
        masked = logits.clone()
        windows = masked.view(-1, W, V)
        for request in self.selected:
            at = torch.full((1,), request, dtype=torch.int64, device=logits.device)
            windows[request] = torch.where(self.allowed(at, V)[0], windows[request], -torch.inf)
        return masked

    def requests(self) -> torch.Tensor:
        """`selected` on the device, int64 [N]."""
        index = torch.tensor(self.selected, dtype=torch.int64)
        return index.pin_memory().to(self.bits.device, non_blocking=True) if self.bits.is_cuda else index

    def part(self, start: int, stop: int) -> TokenMask:
        """The mask of requests `start` to `stop` alone."""
        selected = [request - start for request in self.selected if start <= request < stop]
        return TokenMask(self.bits, self.index[start:stop], selected)
