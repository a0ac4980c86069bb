"""Random int4 weights in the form that kernels read, and their values."""

from __future__ import annotations

import torch


def random_int4(rows: int, columns: int, group: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [rows, columns / 2], scales and zero points float16 [rows, columns / group, 2], the weights float32 [rows, columns]."""
    codes = torch.randint(16, (rows, columns), device=device)
    scale = (torch.rand((rows, columns // group), device=device) * 0.02 + 0.001).half()
    zero = torch.randint(16, scale.shape, device=device)
    values = (codes - zero.repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)
    halves = codes.view(rows, -1, 2, 16)
    packed = (halves[:, :, 0] | halves[:, :, 1] << 4).to(torch.uint8).flatten(1)
    return packed, torch.stack((scale, zero.half()), dim=2), values
