"""Attention of whole prompts by torch's flash kernel, for latent attention in its plain form."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.layers.forward_batch import ForwardBatch


def attend_prompts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, batch: ForwardBatch) -> torch.Tensor:
    """Causal attention of whole prompts, one after another: [T, H, value_dim].

    q, k: [T, H, dim]; v: [T, H, value_dim], padded to `dim` because the kernel needs keys and values of equal width.
    """
    assert batch.extend_lens is not None, "a pass of prompts"
    value_dim = v.shape[2]
    v = F.pad(v, (0, q.shape[2] - value_dim)) if value_dim < q.shape[2] else v
    parts = zip(*(x.transpose(0, 1).split(batch.extend_lens.tolist(), dim=1) for x in (q, k, v)), strict=True)
    outs = [F.scaled_dot_product_attention(*(x[None] for x in one), is_causal=True, scale=scale)[0] for one in parts]
    return torch.cat(outs, dim=1).transpose(0, 1)[..., :value_dim]
