"""Numbers of rows with which torch's bfloat16 GEMMs on a CPU give a row the same bits in every pass, found by trial."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch.nn import functional as F

PADDED = (1, 2, 3, 4)
"""Numbers of rows to which a smaller pass may be padded: they take about as long as one, because reading the weight takes longest."""
LIMITS = (8, 16, 32, 48, 64)
"""Larger numbers of rows to test. If GEMMs of the last sum like all others, so do larger ones."""
PROMPT_LIMITS = (64, 128, 256, 512)
"""Numbers of rows to test for the blocks of a prompt."""
PROMPT_BLOCK = 128
"""The size of such a block that is always used: with a larger one short prompts take longer, with a smaller one long prompts."""
MAX_OUTPUTS = 1 << 14
"""Outputs of a trial's weight, so that the trial for an LM head needs little memory."""
COMPARED = 1 << 17
"""Values to compare: rounding hides most differences, and about one value in 5,000 shows them."""
ANY = range(1, 1 << 32)


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Numbers of rows of GEMMs that sum a row alike, ascending.

    With AMX, GEMMs of up to 32 rows sum the columns of a row in order. Larger ones with at least 512 columns sum blocks of columns
    separately. The blocks depend on the number of rows, the shape of the weight and the number of threads.

    Attributes:
        steps: for all passes but prompts.
        prompts: for prompts. If larger passes are split, prompts have larger blocks with other sums, because AMX is faster with them.
    """

    steps: Sequence[int] = ANY
    prompts: Sequence[int] = ANY


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
    """`F.linear` of `x` [T, in]. In bfloat16 on a CPU a row has the same bits for any number of other rows, if `row_sizes` finds a way.
    In prompts it may have others than in other passes.
    """
    if x.dtype is not torch.bfloat16 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    sizes = row_sizes(*weight.shape)
    return in_blocks(x, weight, bias, sizes.prompts if in_prompt else sizes.steps)


def in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int]) -> torch.Tensor:
    """`F.linear` in blocks of rows. A block has the smallest of the ascending `sizes` that holds the remaining rows, or else the largest.

    The last block is padded with zeros.
    """
    if len(x) in sizes or not len(x):
        return F.linear(x, weight, bias)
    blocks, missing = [], len(x)
    while missing > 0:
        blocks.append(sizes[min(bisect_left(sizes, missing), len(sizes) - 1)])
        missing -= blocks[-1]
    padded = F.pad(x, (0, 0, 0, -missing)) if missing else x
    if len(blocks) == 1:
        return F.linear(padded, weight, bias)[: len(x)]
    out = x.new_empty(len(padded), len(weight))
    for rows, block in zip(padded.split(blocks), out.split(blocks), strict=True):
        if bias is None:
            torch.mm(rows, weight.T, out=block)
        else:
            torch.addmm(bias, rows, weight.T, out=block)
    return out[: len(x)]


@functools.cache
def row_sizes(out_features: int, in_features: int) -> RowSizes:
    """The sizes for a shape of weights; any if no size sums like the smaller ones. Takes about 0.1 s."""
    trial = _Trial(out_features, in_features)
    for most in reversed(LIMITS):
        alike = functools.partial(trial.alike, most)
        least = min(takewhile(alike, reversed(PADDED)), default=0)
        if least and all(alike(rows) for rows in LIMITS if rows < most):
            steps = range(least, ANY.stop if most == LIMITS[-1] else most + 1)
            return RowSizes(steps, steps if steps.stop == ANY.stop else trial.prompt_sizes())
    return RowSizes()


class _Trial:
    """GEMMs of different numbers of rows over one random weight."""

    def __init__(self, out_features: int, in_features: int) -> None:
        self._noise, outputs = torch.Generator().manual_seed(0), min(out_features, MAX_OUTPUTS)
        self._weight, self._tried = self._random(outputs, in_features), max(1, COMPARED // outputs)
        self._x = self._random(-(-self._tried // LIMITS[-1]) * LIMITS[-1], in_features)
        self._results = {rows: self._multiply(self._x, rows) for rows in (*PADDED, *LIMITS)}

    def alike(self, one: int, other: int) -> bool:
        """Whether GEMMs of these numbers of rows give the same bits."""
        a, b = self._results[one], self._results[other]
        count = min(len(a), len(b))
        return torch.equal(a[:count], b[:count])

    def prompt_sizes(self) -> tuple[int, ...]:
        """Those of `PROMPT_LIMITS` that give the same bits as `PROMPT_BLOCK`."""
        self._tried = PROMPT_LIMITS[-1]
        x = self._random(self._tried, self._x.shape[1])
        block = self._multiply(x, PROMPT_BLOCK)
        return tuple(rows for rows in PROMPT_LIMITS if torch.equal(self._multiply(x, rows), block))

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-1, 1, generator=self._noise)

    def _multiply(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        starts = range(0, min(self._tried, len(x) - rows + 1), rows)
        return torch.cat([F.linear(x[i : i + rows], self._weight) for i in starts])
