"""The two GEMMs per head of absorbed latent attention by `torch.bmm`: the reference, also used for many tokens."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.layers.latent_heads import LatentHeads

TOKEN_TILES = (8, 16)
"""Token counts with a kernel that reads the weights once; for more tokens cuBLAS is used."""
PROMPT_ROWS = 32
"""Tokens of the GEMMs into which a prompt is split on a CPU."""


def token_tile(tokens: int) -> int:
    """The smallest of `TOKEN_TILES` that covers this many tokens."""
    return next(tile for tile in TOKEN_TILES if tile >= tokens)


def absorb_by_bmm(q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
    """Queries over latent rows, without their rotated columns.

    Args:
        q: [T, H, query_dim].
        heads: the widths of heads and rows.
        key: [H, nope_dim, kv_rank].
        in_prompt: whether the rows belong to a prompt pass.

    Returns:
        [T, H, row_dim] contiguous.
    """
    query = torch.empty((*q.shape[:2], heads.row_dim), dtype=q.dtype, device=q.device)
    _multiply(q[..., : heads.nope_dim], key, query[..., : heads.kv_rank], in_prompt)
    return query


def project_by_bmm(attended: torch.Tensor, value: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
    """Values of heads: `attended` [T, H, kv_rank] and `value` [H, value_dim, kv_rank] -> [T, H, value_dim] contiguous."""
    out = torch.empty((*attended.shape[:2], value.shape[1]), dtype=attended.dtype, device=attended.device)
    _multiply(attended, value.transpose(1, 2), out, in_prompt)
    return out


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, in_prompt: bool) -> None:
    """`out` [T, H, n] = `x` [T, H, k] times `weight` [H, k, n].

    In float32 on a CPU the bits of a row do not depend on the other rows: prompts run in GEMMs of one size, other passes in one per row.
    Heads follow one another, so that their weights stay in the cache.
    """
    if x.device.type != "cpu" or x.dtype is not torch.float32 or (len(x) == 1 and not in_prompt):
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    elif in_prompt:
        for rows, block in zip(x.split(PROMPT_ROWS), out.split(PROMPT_ROWS), strict=True):
            padded = F.pad(rows, (0, 0, 0, 0, 0, PROMPT_ROWS - len(rows)))
            block.copy_(torch.bmm(padded.transpose(0, 1), weight).transpose(0, 1)[: len(rows)])
    else:
        for head, own in enumerate(weight):
            torch.bmm(x[:, head, None], own.expand(len(x), -1, -1), out=out[:, head, None])
