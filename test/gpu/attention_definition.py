"""Attention over a paged cache by its definition, for tests of kernels; without Triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

BF16 = torch.bfloat16


def definition(case: Any, causal: bool, window: int, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and base-2 log-sum-exp in float64, request by request; zeros for requests without keys."""
    shape, keys, W = case.shape, case.keys, case.shape.width
    group, out = shape.num_q_heads // shape.num_kv_heads, torch.zeros(case.q.shape, dtype=torch.float64)
    lse = torch.full(case.q.shape[:2], float("-inf"), dtype=torch.float64)
    scales = (1.0, 1.0) if case.kv_scales is None else case.kv_scales.tolist()
    for b, length in enumerate(keys.seq_lens.tolist()):
        if length == 0:
            continue
        positions, mine = torch.arange(length, device=case.q.device), slice(b * W, (b + 1) * W)
        slots = keys.pages[int(keys.rows[b]), positions // keys.page_size].long() * keys.page_size + positions % keys.page_size
        k, v = (stored(cache, slots).repeat_interleave(group, 1) * s for cache, s in zip((case.k, case.v), scales, strict=True))
        own = length - W + torch.arange(W, device=case.q.device)[:, None]
        seen = ((positions <= own) | (not causal)) & ((positions >= own - window) | (window < 0))
        scores = torch.einsum("whd,nhd->whn", case.q[mine].double(), k) * shape.head_dim**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[None, :, None].expand(W, -1, 1)], dim=2)
        out[mine] = torch.einsum("whn,nhd->whd", scores.softmax(-1)[:, :, :length], v).cpu()
        lse[mine] = scores.logsumexp(-1).cpu() / np.log(2)
    return out, lse


def stored(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys or values of these slots, in float64; torch cannot index 8-bit floats."""
    flat = cache.flatten(0, 1)
    return flat.view(torch.uint8)[slots].view(flat.dtype).double() if flat.itemsize == 1 else flat[slots].double()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """The tolerance is 4e-3 in float16. In bfloat16, results and softmax weights are each rounded by up to 1/512."""
    error = (got.cpu().double() - want).abs()
    if got.dtype is BF16:
        error /= 2 + 2 * want.abs()
    assert error.max() < 4e-3, f"off by {error.max():.1e}"
