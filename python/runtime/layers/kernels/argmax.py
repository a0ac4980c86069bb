"""Argmax of each row of logits, on any device."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.argmax(logits, dim=-1)`; the first of equal entries always wins.

    Args:
        logits: float32 [N, V], rows contiguous.
        out: written and returned if given, int64 [N] contiguous.
    """
    if not logits.is_cuda:
        return torch.argmax(logits, dim=-1) if out is None else torch.argmax(logits, dim=-1, out=out)
    from runtime.layers.kernels.argmax_kernel import argmax_rows
    from runtime.layers.kernels.pdl import starts_early

    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    return argmax_rows(logits, out, pdl=starts_early(logits.device))
