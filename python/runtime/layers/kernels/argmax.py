"""Argmax of each row of logits, on any device."""

from __future__ import annotations

import torch

BLOCK = 128
"""Block size of the search on a CPU, where torch's `amax` is vectorised and its `argmax` is not."""


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.argmax(logits, dim=-1)`; the first of equal entries always wins.

    Args:
        logits: float32 [N, V], rows contiguous.
        out: int64 [N] contiguous; if given, written and returned.
    """
    if not logits.is_cuda:
        chosen = _argmax_by_blocks(logits) if logits.shape[1] % BLOCK == 0 else logits.argmax(1)
        return chosen if out is None else out.copy_(chosen)
    from runtime.layers.kernels.argmax_kernel import argmax_rows
    from runtime.layers.kernels.pdl import starts_early

    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    return argmax_rows(logits, out, pdl=starts_early(logits.device))


def _argmax_by_blocks(logits: torch.Tensor) -> torch.Tensor:
    blocks = logits.unflatten(1, (-1, BLOCK))
    best = blocks.amax(2).argmax(1)
    return best * BLOCK + blocks[torch.arange(len(blocks)), best].argmax(1)
