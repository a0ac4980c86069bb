"""The least number of rows with which torch's bfloat16 GEMMs on a CPU give a row the same bits in every pass, found by trial."""

from __future__ import annotations

import functools
from itertools import takewhile

import torch
from torch.nn import functional as F

PADDED = (1, 2, 3, 4)
"""Numbers of rows to which a smaller pass may be padded: they take about as long as one, because reading the weight takes longest."""
OTHERS = (8, 16, 32, 48)
"""Larger numbers of rows to test; with `WHOLE` rows they are compared."""
WHOLE = 64
MAX_OUTPUTS = 1 << 14
"""Outputs of a trial's weight, so that the trial for an LM head needs little memory."""
COMPARED = 1 << 17
"""Values to compare: rounding hides most differences, and about one value in 5,000 shows them."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of `x` [T, in]. In bfloat16 on a CPU a row has the same bits for any number of other rows, if `min_rows` finds a way."""
    rows = len(x)
    if 0 < rows < PADDED[-1] and x.device.type == "cpu" and x.dtype is torch.bfloat16:
        missing = min_rows(*weight.shape) - rows
        if missing > 0:
            return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[:rows]
    return F.linear(x, weight, bias)


@functools.cache
def min_rows(out_features: int, in_features: int) -> int:
    """The number of rows to which smaller passes are padded, from 1 to 4; 1 also if a row differs with more rows. Takes about 0.1 s."""
    noise, outputs = torch.Generator().manual_seed(0), min(out_features, MAX_OUTPUTS)
    weight, x = (torch.empty(n, in_features, dtype=torch.bfloat16).uniform_(-1, 1, generator=noise) for n in (outputs, WHOLE))
    whole, tried = F.linear(x, weight), min(WHOLE, max(1, COMPARED // outputs))

    def same(rows: int) -> bool:
        starts = range(0, min(tried, WHOLE - rows + 1), rows)
        return all(torch.equal(F.linear(x[i : i + rows], weight), whole[i : i + rows]) for i in starts)

    return min(takewhile(same, reversed(PADDED)), default=1) if all(map(same, OTHERS)) else 1
