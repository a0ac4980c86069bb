"""The two GEMMs per head of absorbed latent attention on a GPU: CUDA kernels for few tokens, otherwise `torch.bmm`."""

from __future__ import annotations

import torch

from runtime.layers.absorption import absorb_by_bmm, project_by_bmm
from runtime.layers.attention.kernels import absorb_queries, project_values
from runtime.layers.kernels.latent_rows import rotate_heads
from runtime.layers.latent_heads import LatentHeads


def absorb(q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Multiply queries [T, H, query_dim] by keys [H, nope_dim, kv_rank], and rotate: [T, H, row_dim]. `pdl`: as in `absorb_queries`."""
    if absorb_queries.supports(q, heads, key):
        return absorb_queries.absorb_queries(q, heads, key, positions, pdl=pdl)
    query = absorb_by_bmm(q, heads, key)
    rotate_heads(q[..., heads.nope_dim :], heads.rope, positions, query[..., heads.kv_rank :], pdl)
    return query


def project(attended: torch.Tensor, value: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Multiply sums of latents [T, H, kv_rank] by values [H, value_dim, kv_rank]: [T, H, value_dim]. `pdl`: as in `project_values`."""
    if project_values.supports(attended, value):
        return project_values.project_values(attended, value, pdl=pdl)
    return project_by_bmm(attended, value)
