"""Absorbed latent attention's two GEMMs per head, by `torch.bmm`: the definition, and what passes of many rows run."""

from __future__ import annotations

import torch

from runtime.layers.latent_heads import LatentHeads

MAX_ROWS = 64
"""Above this many rows, or in float32, `torch.bmm` runs on a GPU too.

Each tile of 32 rows reads all weights, the first from memory and the others from L2, and as many bytes of its rows: for GLM-4.7-Flash's
values 10 MB a tile. cuBLAS reads both less often, in larger tiles.
"""
ROW_TILES = (16, 32)
"""Rows of one program: a pass uses the smallest that holds all its rows, or several of the last. One kernel is compiled for each."""


def absorb_by_bmm(q: torch.Tensor, heads: LatentHeads, key: torch.Tensor) -> torch.Tensor:
    """Queries over latent rows, whose rotated columns are still to be written.

    Args:
        q: [T, H, query_dim].
        heads: widths.
        key: [H, nope_dim, kv_rank].

    Returns:
        [T, H, row_dim] contiguous.
    """
    query = torch.empty((*q.shape[:2], heads.row_dim), dtype=q.dtype, device=q.device)
    torch.bmm(q[..., : heads.nope_dim].transpose(0, 1), key, out=query[..., : heads.kv_rank].transpose(0, 1))
    return query


def project_by_bmm(attended: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Values of heads: `attended` [T, H, kv_rank] and `value` [H, value_dim, kv_rank] -> [T, H, value_dim] contiguous."""
    out = torch.empty((*attended.shape[:2], value.shape[1]), dtype=attended.dtype, device=attended.device)
    torch.bmm(attended.transpose(0, 1), value.transpose(1, 2), out=out.transpose(0, 1))
    return out
