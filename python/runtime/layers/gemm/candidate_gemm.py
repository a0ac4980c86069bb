"""Greedy drafts by a head with candidates: the kernels in their order."""

from __future__ import annotations

import torch

from runtime.config.kernel_configs import TritonConfig
from runtime.layers.candidate_head import CandidateHead
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.quantized_rows import quantize_rows
from runtime.layers.gemm.triton_gemm import triton_gemm
from runtime.layers.kernels.candidates import best_of_tiles

CANDIDATES = 16
"""Maximum number of tokens that the 16-bit weights score; heads of few tiles have fewer. Rounding weights and rows to e4m3 changes scores
by 4 to 6 % of their standard deviation; if these are normally distributed, the 16th of 128,000 tokens lies 80 % of one below the best."""


def best_candidate(
    x: torch.Tensor, head: CandidateHead, config: TritonConfig, pdl: bool, out: torch.Tensor, logits: torch.Tensor | None
) -> torch.Tensor:
    """int64 [M] in `out`: the token of each row with the largest score among up to `CANDIDATES`.

    Args:
        x: bfloat16 [M, K] contiguous, M <= 128.
        head: a head that has its copy.
        config: the tiling of the GEMM in e4m3.
        pdl: as in `triton_gemm`.
        logits: float32 [M, V] contiguous; receives the logits of all candidates if given.
    """
    own, narrow = head.own.weight, head.narrow
    assert narrow is not None, "the head has lost its copy"
    rows, _ = quantize_rows(x, pdl=pdl)
    tiles = torch.empty((2, len(x), config.parts(len(own))), dtype=torch.int32, device=x.device)
    triton_gemm(rows, narrow, None, config, Epilogue(argmax=tiles), pdl=pdl)
    return best_of_tiles(tiles, x, own, head.stride, CANDIDATES, out, pdl, logits)
