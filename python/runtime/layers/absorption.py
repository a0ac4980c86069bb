"""The two GEMMs per head of absorbed latent attention by `torch.bmm`: the reference, also used for many tokens."""

from __future__ import annotations

import torch

from runtime.layers.latent_heads import LatentHeads

TOKEN_TILES = (8, 16)
"""Token counts with a kernel that reads the weights once; for more tokens cuBLAS is used."""


def token_tile(tokens: int) -> int:
    """The smallest of `TOKEN_TILES` that covers this many tokens."""
    return next(tile for tile in TOKEN_TILES if tile >= tokens)


def absorb_by_bmm(q: torch.Tensor, heads: LatentHeads, key: torch.Tensor) -> torch.Tensor:
    """Queries over latent rows, without their rotated columns.

    Args:
        q: [T, H, query_dim].
        heads: the widths of heads and rows.
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
