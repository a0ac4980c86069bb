"""A draft's LM head with a copy in 8 bits, which rules out most tokens before the 16-bit weights are read."""

from __future__ import annotations

import math
from typing import Literal

import torch

from runtime.config.kernel_configs import TritonConfig
from runtime.layers.linear import Linear
from runtime.layers.quantization.fp8 import E4M3, E4M3_MAX

LEAST_BYTES = 64 << 20
"""Smaller heads take less time to read than the kernels that rank candidates."""
ROWS_AT_ONCE = 8192
"""Rows that are quantised at a time, so that their float32 copy is small."""


class CandidateHead:
    """An LM head for greedy drafts: 8-bit weights and rows score all tokens, then the head's own weights score the best of these.

    A draft that misses the head's own argmax costs acceptance but changes no text, so only drafts use it.

    The GEMM over the copy finds only the best token of each tile of rows. Frequent tokens are neighbours in most vocabularies, so the copy
    has them far apart: its row i scores token `i * stride % V`.

    Attributes:
        own: the LM head [V, hidden] in bfloat16, or this rank's rows of it.
        stride: coprime to V.
        narrow: e4m3 [V, hidden], the head's rows less their mean, all divided by one number, neither of which changes the order of
            scores; None if it is faster for no number of rows.
        choices: the tiling for each m bucket for which it is faster, by the trial at start-up.
        op, name: in keys of timings, and in reports.
        dtype, most_rows, gemm_rows: of the copy; the most rows of states; rows of its GEMM per row of states.
    """

    op: Literal["candidates"] = "candidates"
    name, dtype, most_rows, gemm_rows = "draft head", E4M3, math.inf, 1

    def __init__(self, own: Linear) -> None:
        self.own, self.stride = own, stride_of(own.out_features)
        self.narrow: torch.Tensor | None = _narrow(own.weight, self.stride)
        self.choices: dict[int, TritonConfig] = {}


def takes_candidates(head: Linear) -> bool:
    """Whether a head is in bfloat16 and, on each rank, too large to be read quickly; the same on all ranks."""
    share = head.whole // (head.group.size if head.is_sharded else 1) * head.in_features * 2
    return head.is_dense and head.weight.dtype is torch.bfloat16 and head.bias is None and share >= LEAST_BYTES


def stride_of(count: int) -> int:
    """About 0.618 of `count` and coprime to it, so that neighbours, and any few numbers close to each other, are spread evenly."""
    stride = round(count * (5**0.5 - 1) / 2)
    return next(number for number in range(stride, stride + count) if math.gcd(number, count) == 1)


def _narrow(weight: torch.Tensor, stride: int) -> torch.Tensor:
    """What all tokens have in common, which may be most of a score, is subtracted, because it would be rounded differently for each."""
    mean = torch.stack([piece.float().sum(0) for piece in weight.split(ROWS_AT_ONCE)]).sum(0) / len(weight)
    largest = torch.stack([(piece.float() - mean).abs().amax() for piece in weight.split(ROWS_AT_ONCE)]).amax().clamp_(min=1e-12)
    tokens = torch.arange(len(weight), device=weight.device) * stride % len(weight)
    narrow = torch.empty_like(weight, dtype=E4M3)
    for rows, out in zip(tokens.split(ROWS_AT_ONCE), narrow.split(ROWS_AT_ONCE), strict=True):
        out.copy_(((weight[rows].float() - mean) * (E4M3_MAX / largest)).clamp_(-E4M3_MAX, E4M3_MAX))
    return narrow
